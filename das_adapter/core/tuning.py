"""The one table of the numbers that decide policy: how much is drafted, for whom, when
an engine rests, and which text is kept.

Each number has a unit and a reason: the file of the result that shows it, the paper's
equation it comes from, or "a guess". Sizes of buffers, formats of files and limits of
the hosts are not here: they decide nothing about drafts.

Code reads a number as `tuning.NAME`. The C++ core reads those of its section from a
header that is generated from this file when the package is built.
"""

from __future__ import annotations

from typing import TypeVar

Value = TypeVar("Value", int, float, tuple[float, ...])


def number(value: Value, unit: str, reason: str) -> Value:
    """Return `value`; `unit` and `reason` are for the reader and for
    `docs/tuning.md`.
    """
    return value


# verl/router.py

REQUESTS_PER_LENGTHS = number(
    1024,
    "requests",
    "a guess: after so many requests the ledger is asked for lengths again",
)

# nemo_rl/generation.py

LENGTHS_FOR_S = number(
    10.0,
    "seconds",
    "a guess: so long an asynchronous run uses the same expected lengths",
)

# What is written ahead of the next steps (service/run_ahead.py, sim/pipeline.py)

RUN_AHEAD_STEPS = number(
    4,
    "steps that are written ahead",
    "a guess: with one, a step that was written ahead leaves hardly an engine idle to"
    " write the next; a long tail is enough for several; what was written more weight"
    " syncs ago is repeated less",
)
RUN_AHEAD_POLL_S = number(0.2, "s between two looks for idle replicas", "a guess")
RUN_AHEAD_MIN_REPEATED_SHARE = number(
    0.05,
    "share of the tokens written ahead that requests must repeat, or it rests",
    "a guess",
)
RUN_AHEAD_REST_STEPS = number(
    8, "steps of the first rest after a step that was not worth it", "a guess"
)
RUN_AHEAD_MAX_REST_STEPS = number(64, "steps of a rest, at most", "a guess")

# The suffix index and the store of a node's history (core/index)

FIXED_CHANCE = number(
    0.15,
    "chance to be accepted below which a draft ends, where no budget decides",
    "a guess: a token that is rejected six times out of seven is not worth its place"
    " in a step",
)

SEAL_SLICE_TOKENS = number(
    200_000,
    "tokens that are sealed, merged or thinned out in one slice",
    "a guess: a weight sync waits for one slice at most; benchmarks/results/index.json"
    " has seal_step_ms and merge_ms",
)
WRITE_SLICES = number(
    8,
    "slices whose tokens are written to one file",
    "a guess: files of about 1.6 million tokens, so that there are few of them",
)
SEAL_QUIET_S = number(
    0.5,
    "seconds without a new text after which an incomplete group is sealed",
    "a guess: rollouts of one problem end within a few seconds of each other",
)


# The C++ core (csrc)
#
# CMake writes a header from the names that begin with CPP_. In C++ they are in the
# namespace das::tuning, without that prefix: CPP_VOTE_POWER is tuning::VOTE_POWER. An
# int becomes a uint32_t, a float a double, a tuple a std::array. The kernels of vLLM's
# V2 runner get the rules of drafting from the C++ core (`drafting_rules`).

# Which places of a text are found (suffix_text.hpp, suffix_segment.hpp,
# suffix_live.hpp)

CPP_DEPTH_TOKENS = number(
    64,
    "tokens of left context that are compared, at most",
    "a guess: a longer match is hardly surer; files of a history have it in their"
    " header, and are refused with another one",
)
CPP_PLACES_PER_SEARCH = number(
    16,
    "places that one search visits in sealed text, and per gram in live text",
    "a guess: more of them cost time in each decode step; benchmarks/results/index.json"
    " has that time",
)
CPP_LIVE_GRAM_TOKENS = number(
    (4, 2, 1),
    "last tokens with which live text is searched, one search after the other",
    "a guess: long matches first, single tokens where nothing else is found",
)
CPP_ENOUGH_LIVE_PLACES = number(
    8,
    "places found in live text with which shorter grams are not searched",
    "a guess: half of CPP_PLACES_PER_SEARCH",
)
CPP_LIVE_FOUND_TOKENS = number(
    16_384,
    "tokens at the end of a live text in which places are found",
    "a guess: bounds the time and memory of long responses;"
    " benchmarks/results/long_responses.json has theirs",
)
CPP_LIVE_TRIM_TOKENS = number(
    32_768,
    "tokens of a live text from which on it is cut to CPP_LIVE_FOUND_TOKENS",
    "a guess: twice as many, so that texts are rarely cut",
)
CPP_BEYOND_TOKENS = number(
    3,
    "equal tokens beyond one that differs that count as strength, at most",
    "a guess: a single substitution does not end a similar text",
)
CPP_SURE_STRENGTH = number(
    8,
    "half tokens of strength from which on differing last tokens are not searched",
    "a guess: four equal tokens, as the longest gram of live text has",
)

# Votes on the next token (suffix_draft.hpp)

CPP_VOTE_POWER = number(
    6,
    "power of strength + 1 that a place votes with",
    "a guess: the longest match nearly decides, but many shorter ones can outvote it",
)
CPP_MOST_STRENGTH = number(
    199,
    "half tokens of strength that count, at most",
    "a guess: above the 131 that a place has when it is found, so that drafted tokens"
    " add to it; votes stay within 64 bits",
)
CPP_OWN_WEIGHT = number(
    512,
    "weight of a place in the request's own response",
    "a guess: twice a sibling's",
)
CPP_SIBLING_WEIGHT = number(
    256,
    "weight of a place in a sibling's response or in the newest visit",
    "a guess: the unit that the other weights are compared with",
)
CPP_PROMPT_WEIGHT = number(
    64,
    "weight of a place in the request's prompt",
    "a guess: a quarter of a sibling's",
)
CPP_HALF_LIFE_VISITS = number(
    8.0,
    "newer visits of its problem after which a text's weight is halved",
    "a guess: as many as history.window keeps; benchmarks/results/history.json"
    " (windows) shows that older visits help a little",
)

# The chance that a draft token is accepted (suffix_draft.hpp)

CPP_SHARE_STEPS = number(
    (0.3, 0.5, 0.7, 0.85, 0.95, 0.99, 1.0),
    "shares of the votes at which a draft token's class changes",
    "a guess: finer where shares are large, as most are",
)
CPP_STRENGTH_STEPS = number(
    (3, 5, 8, 12, 18, 32, 64),
    "half tokens of strength at which a draft token's class changes",
    "a guess: about geometric",
)
CPP_COUNT_STEPS = number(
    (2, 4),
    "numbers of voting places at which a draft token's class changes",
    "a guess: one place, a few, many",
)
CPP_PRIOR_OFFSET = number(
    3.0,
    "minus the logit of the prior chance in the lowest classes",
    "a logistic fit to recorded rollouts of twelve models",
)
CPP_PRIOR_SHARE = number(
    0.4,
    "logit of the prior chance per class of share",
    "a logistic fit to recorded rollouts of twelve models",
)
CPP_PRIOR_STRENGTH = number(
    0.3,
    "logit of the prior chance per class of strength",
    "a logistic fit to recorded rollouts of twelve models",
)
CPP_PRIOR_COUNT = number(
    0.65,
    "logit of the prior chance per class of voting places",
    "a logistic fit to recorded rollouts of twelve models",
)
CPP_PRIOR_TOKENS = number(
    40.0,
    "tokens that the prior of a kind weighs",
    "a guess: a kind's own counts lead after a few steps of a batch",
)
CPP_SOURCE_PRIOR_TOKENS = number(
    8.0,
    "tokens with which a source starts at the rates of the prior",
    "a guess: a source has many more tokens than one of its kinds",
)
CPP_MEMORY_TOKENS = number(
    8192,
    "tokens of a kind or of a source at which its counts are halved",
    "a guess: follows a policy that changes, and varies by less than a hundredth",
)
CPP_AHEAD_CHANCE = number(
    0.95,
    "prior chance of a token that was written ahead with the request's noise",
    "a guess: the policies differ by one update; benchmarks/results/agreement.json has"
    " how far texts agree after updates of several sizes",
)
CPP_INLINE_REQUESTS = number(
    4,
    "requests up to which drafting wakes no thread",
    "measured when it was added: waking the thread takes longer than their search, a"
    " V1 step of one request waits 42 us instead of 62",
)

# What the next drafts will be, on vLLM's V2 runner (live_texts.cpp)

CPP_FORECAST_BATCHES = number(
    256.0,
    "batches over which the average draft, and how it lasts, are measured",
    "a guess: some seconds of decoding",
)
CPP_UNOFFERED_BATCHES = number(
    100.0,
    "batches without a draft after which half the average draft is expected",
    "simulated when it was added: without it rollouts in which drafts do not pay take"
    " 1.015 of off, with it 1.0055; gaps of 100 tokens lose a hundredth of the gain",
)

# Which text a history keeps (suffix_index.cpp, suffix_thin.hpp)

CPP_SEGMENTS_PER_PROBLEM = number(
    8,
    "segments of one problem, at most; the oldest go where merging leaves more",
    "a guess: one search visits all of them; 134 million tokens fit",
)
CPP_LEAST_PROBLEM_BYTES = number(
    256,
    "bytes that each problem keeps before whole problems are dropped",
    "a guess: some 35 tokens; fewer are hardly a draft",
)
CPP_THINNED_TOKENS = number(
    1_048_576,
    "tokens of a problem above which whole visits go instead of stretches of text",
    "measured when it was added: to thin out a million tokens takes a second, six"
    " million 16 s, to drop visits 0.2 s",
)
CPP_THINNED_QUARTERS = number(
    3,
    "quarters of the level that a problem is thinned out to",
    "a guess: a problem that grows is not thinned out at every weight sync",
)
CPP_FLAT_FILL_SHARE = number(
    0.9,
    "share of a device's room that a thinned history is aimed at",
    "a guess: words are counted there, bytes here",
)
CPP_THIN_GRAM_TOKENS = number(
    (2, 4, 8),
    "equal tokens before a token that make it the same in two texts",
    "a guess: from what is often shared to what is nearly a copy;"
    " benchmarks/results/history.json (budgets) has accepted tokens by budget",
)
CPP_THIN_CONTEXT_TOKENS = number(
    8,
    "tokens that stay in front of a stretch, so that matches can begin there",
    "a guess: the longest of CPP_THIN_GRAM_TOKENS",
)
CPP_THIN_PRICE_QUARTERS = number(
    3,
    "quarters of the price of a byte from one pass over the texts to the next",
    "a guess: a few dozen passes; smaller steps take longer",
)

# How a history lies in files (suffix_build.hpp, suffix_index.cpp, suffix_store.hpp)

CPP_MERGE_RATIO = number(
    16,
    "times the tokens of the younger segments that an older one may have to join them",
    "a guess: bounds how often a token is written again",
)
CPP_SPARE_SEGMENTS = number(
    2,
    "free segments of a problem below which older ones join in any case",
    "a guess: room for the texts that arrive while segments wait to be merged",
)
CPP_FILE_BYTES = number(
    16_777_216,
    "bytes at which a file is full",
    "a guess: hundreds of files for a history of 8 GiB",
)
CPP_FILE_USED_PERCENT = number(
    75,
    "percent of a file's bytes in use below which they are written again",
    "a guess: files take at most a third more than the history",
)
CPP_FILES_ALIKE = number(
    16,
    "files of about one size that are written again as one; the ratio of these sizes",
    "a guess: a byte is written again once per factor 16",
)
CPP_OLDER_GENERATIONS = number(
    2,
    "older generations that can still be mapped",
    "a guess: ranks of an engine are at most that far apart",
)
CPP_WHOLE_SEGMENTS = number(
    1024,
    "segments that a complete manifest has at no count of changes",
    "a guess: a small manifest costs less than following changes",
)
