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


# How much is drafted, and for whom (core/policy.py)

RECURRENT_DRAFT = number(
    3,
    "draft tokens, at most, of a policy with recurrent state, where the block leaves it"
    " open",
    "a guess: each takes a whole state of each request, 61 MiB with Qwen3.5-35B",
)
RECURRENT_DRAFT_MOST = number(
    7,
    "draft tokens, at most, of a policy with recurrent state",
    "vLLM's fused kernel for Gated DeltaNet takes 8 tokens (MAX_FUSED_GDN_MTP_TOKENS)",
)

REPLAN_STEPS = number(
    64,
    "decode steps after which the worth of a token is computed anew, at the latest",
    "a guess: lengths and pace change little in so many steps",
)
REPLAN_FIRST_STEPS = number(
    4,
    "decode steps until the worth is computed for the second time, then 8, 16, ...",
    "a guess: soon after an arrival, for the batch is new",
)
REFILL_STEPS = number(
    64,
    "decode steps for which a request that took another's place makes the batch one"
    " that refills",
    "a guess: arrivals are further apart only where a queue runs empty",
)
PROBE_REQUESTS = number(
    4,
    "requests drafted for in a probe step, at most",
    "a guess: few, since they cost time; the same ones each time, since a neural"
    " drafter reads what they have written since",
)
PROBE_BATCH_SHARE = number(
    0.25,
    "share of the batch that is drafted for in a probe step, at most",
    "a guess: a small batch is not slowed down as a whole",
)
LEAST_CHANCE = number(
    0.005,
    "survival chance under which no draft token is considered",
    "a guess: below what any token is worth, so that it bounds the search alone",
)
FIXED_CHANCE = number(
    0.15,
    "survival chance under which a draft ends where costs are not asked (`das`,"
    " `uniform`), and in the index by itself",
    "a guess: a token that is rejected six times out of seven is not worth its place in"
    " the step",
)


# Whether an engine drafts (core/account.py)

LEAST_GAIN = number(
    0.02,
    "predicted gain of a drafted step, as a share of its time, at least",
    "a guess: step times vary by about as much",
)
STAY_ON_FACTOR = number(
    1.25,
    "times the requests of `speculate` up to which drafting goes on once it has begun",
    "a guess: a batch around that number does not switch drafting to and fro",
)
LOOK_FIRST_STEPS = number(
    2,
    "decode steps until drafts are looked for again where nothing was worth drafting,"
    " then 4, 8, ...",
    "a guess: drafts that ended at a gap of the history are back soon",
)
LOOK_STEPS = number(
    32,
    "decode steps between two looks for drafts, at most",
    "a look is the dearest work of the host where nothing is drafted; on the workload"
    " of benchmarks/results/v2_lengths.json a larger bound changed the rollout time by"
    " 0.0003 at most",
)
LOOK_S = number(
    4e-5,
    "seconds that the host takes to look for drafts",
    "benchmarks/results/controller_overhead.json",
)
LOOK_REQUEST_S = number(
    3e-6,
    "seconds that a look takes for each request",
    "benchmarks/results/index.json: 2.6 to 2.7 us a request",
)
LOOK_SHARE = number(
    0.002,
    "share of the time that looks may take while nothing is worth drafting",
    "simulated steps of a 7B policy on an H100: looks 4 steps apart cost this much, and"
    " find at once what a history with gaps has again (0.70 to 0.60 of the time without"
    " drafts)",
)
PROBE_STEPS = number(
    128,
    "drafted decode steps after which a plain one is taken, and the other way round",
    "benchmarks/results/ablation.json: probes are worth 1.3 % where a model drafts"
    " for 256 requests, and cost up to 0.7 % elsewhere",
)
RARE_STEPS = number(
    1024,
    "decode steps between two probes, at most, where only probes draft",
    "a guess: a probe that never pays costs a thousandth of the steps",
)
GUARD_STEPS = number(
    64,
    "drafted decode steps between two looks at the time saved, and least steps of a"
    " batch before the first",
    "a guess: fewer steps say little about their time",
)
GUARD_LOSS = number(
    0.1,
    "loss that stops drafting, as a share of the drafted steps' time",
    "a guess: by so much may the predicted time of plain steps be wrong; the guard does"
    " nothing in benchmarks/results/ablation.json, and was worth 1 to 2 % where drafts"
    " are hopeless and no weight sync follows (a newer cell of that benchmark)",
)
COLLAPSE_RATE = number(
    0.02,
    "accepted tokens for each draft below which drafts are useless",
    "a guess: far below any drafter that works",
)
COLLAPSE_DRAFTS = number(
    400,
    "drafts before acceptance counts as collapsed, at least",
    "a guess: 8 accepted tokens are the bound, which is no accident any more",
)


# When work is repeated, and which rollouts are at rest (core/backoff.py)

SMALLER_BATCH = number(
    0.9,
    "share of the batch below which work that waits is due at once",
    "a guess: what is worth doing depends on the number of requests",
)
REST_ROLLOUTS = number(
    8,
    "rollouts at rest after a loss, at most; 1, 2 and 4 before",
    "benchmarks/results/ablation.json: rests are worth 5 % where drafts lose in a"
    " large batch, and cost up to 7 % in small ones, where a loss is often chance; the"
    " number is a guess: a rollout that tries drafts again may lose",
)
REST_BALANCE_KEPT = number(
    0.8,
    "share of the balance of saved seconds that is left after a rollout",
    "a guess: about five rollouts count, so that an unlucky one among those that gain"
    " is no reason to rest",
)


# What plain decoding would have taken (core/plain_time.py)

ROLLOUT_LOSS = number(
    0.02,
    "share of the time above which a rollout has lost, beside the scatter of steps",
    "a guess: the promise is 1.02 of stock's time; benchmarks/results/"
    "gpu_gate_1.5b.json measured 1.06 to 1.11 +- 0.05",
)
ROLLOUT_LOSS_SIGMAS = number(
    3.0,
    "standard errors of the step times beyond which a rollout has lost",
    "a guess: as usual for 'beyond doubt'",
)
JUDGED_STEPS = number(
    64,
    "decode steps below which nothing is held against a rollout",
    "a guess: fewer steps say little about their time",
)
JUDGED_SAMPLES = number(
    8,
    "baseline steps below which nothing is held against a rollout",
    "a guess: fewer say little about their scatter",
)
NEAR_REQUESTS = number(
    2.0,
    "times the requests of baseline steps, or that share of them, up to which their"
    " times are known",
    "a guess: beyond, the engine's own steps would have to tell how times go on",
)
BASELINE_SAMPLES = number(
    256,
    "baseline steps whose times are compared with their model, the latest",
    "a guess: enough for their mean and scatter",
)
JUDGED_BATCHES = number(
    64,
    "batches since the last weight sync that count, the latest",
    "a guess: a server without weight syncs does not judge by what is long past",
)
INTERRUPTED_STEP = number(
    2.0,
    "times the predicted seconds as which a step counts, at most",
    "a guess: a step that took longer was interrupted by something else",
)


# How long a decode step takes (core/latency.py)

REFIT_ERROR = number(
    0.25,
    "relative error of recent predictions at which the model is fitted again early",
    "a guess; fitting at the scatter of single times took 36 % of the engine's thread"
    " with a 1.5B policy on an H200",
)
NEWS_SHARE = number(
    0.06,
    "steps since the last fit, as a share of those before it, from which on a step of a"
    " new kind that was predicted wrongly has the model fitted again",
    "a guess: at once among the first 32 steps, and less than a hundred times in all",
)
RECENT_PREDICTIONS = number(
    8,
    "predictions over which the recent error is averaged",
    "a guess: as many as steps until a fit",
)
REFIT_SOON_STEPS = number(
    8,
    "decode steps after which the model is fitted again, at the earliest",
    "a guess: a fit takes as long as a step of a small policy on a GPU",
)
REFIT_FIRST_STEPS = number(
    16,
    "decode steps until the second fit where predictions are right; then they double",
    "a guess: the first steps are of few kinds",
)
REFIT_STEPS = number(
    4096,
    "decode steps after which the model is fitted again, at the latest",
    "benchmarks/results/ablation.json: without a fit rollouts take up to 15 % longer"
    " where a token costs three times what the roofline says; the number is a guess:"
    " longer than most rollouts",
)
STEP_GROWTH = number(
    2.0,
    "times the tokens of the largest step that was timed that a step may have, drafts"
    " included",
    "benchmarks/results/controller_grid.json: what larger steps take is not known; four"
    " or five doublings reach any size",
)
LOGITS_BYTES = number(
    2**31,
    "bytes that the logits of a drafted step take, in float32",
    "a guess: 3,500 tokens of a vocabulary of 152k; vLLM keeps memory free for the"
    " logits of one token of each request alone",
)
LAUNCH_S = number(
    0.005,
    "seconds that a step takes longer whose kernels are launched one by one, until"
    " such a step was seen",
    "a guess: steps within the graphs do not tell",
)
KNEES = number(
    (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512),
    "tokens in a step at which a fitted curve may bend",
    "a guess: powers of two and the middles between them, as far as steps usually"
    " reach",
)
ASSUMED_STEP_S = number(
    0.02,
    "seconds of an empty step until the engine's first steps, without a roofline",
    "a guess: only its relation to the time of a token matters",
)
ASSUMED_DOUBLING_TOKENS = number(
    16,
    "tokens that double the time of that step on a CPU",
    "a guess",
)
ASSUMED_KNEE_TOKENS = number(
    160,
    "tokens up to which that step takes as long on a GPU, and that double it then",
    "the roofline of an A100; simulated H100 steps of a 1.5B policy: 0.54 to 0.53 of"
    " the time without drafts",
)
STEP_TIMES = number(
    15,
    "times that are kept of each kind of step",
    "a guess: their median withstands pauses of the process",
)
CELL_RATE = number(
    0.2,
    "weight of a new step in the mean size of the steps of its kind",
    "a guess: about the last five steps",
)
FIT_TIMES = number(
    2,
    "times of a kind of step below which it does not count as seen",
    "a guess: one time may be a pause",
)
ALIKE_STEPS = number(
    1.1,
    "ratio of the largest to the smallest steps below which they are of one size",
    "a guess: their times do not tell what a token costs",
)
TELLS_DRAFT = number(
    1.25,
    "ratio of the largest to the smallest steps from which on the cost of drafting is"
    " told from that of the tokens",
    "a guess",
)
TELLS_REQUEST = number(
    4.0,
    "ratio of the most to the fewest requests from which on a request's cost is told"
    " from that of a step",
    "a guess",
)
TELLS_CONTEXT = number(
    1.5,
    "ratio of the longest to the shortest context from which on its cost is told from"
    " a request's",
    "a guess",
)
HUBER_MEDIANS = number(
    1.5,
    "median residuals beyond which a time counts less (Huber's weights)",
    "a guess: about one standard deviation of a normal distribution",
)
HUBER_FLOOR = number(
    0.2,
    "relative residual up to which each time counts in full",
    "a guess: step times scatter by as much",
)


# How many draft tokens are accepted (core/acceptance.py)

RATE_PRIOR_TOKENS = number(
    2.0,
    "draft tokens that a model is assumed to have had tried before the first",
    "a guess: the first real drafts decide",
)
RATE_PRIOR_ACCEPTED = number(
    1.6,
    "of these tokens, those that were accepted",
    "a guess: a rate of 0.8",
)
RATE_KEPT = number(
    0.999,
    "share of a rate's counts that is left after a draft",
    "a guess: about the last thousand drafts",
)
RATE_KNOWN_TOKENS = number(
    20.0,
    "draft tokens that make a rate known, and as which it counts after a weight sync",
    "a guess: an error of about 0.1",
)
CURVE_PRIOR_COUNTS = number(
    (160.0, 38.0, 40.0, 20.0),
    "draft tokens, accepted tokens, drafts, and drafts whose first token was accepted,"
    " before the first",
    "a guess: half of the first tokens are accepted, and k of DAS's curve is 0.6",
)
CURVE_KEPT = number(
    0.5,
    "share of the curve's counts that is left after a weight sync",
    "a guess: the new policy accepts about what the last one did",
)
CURVE_FADING_DRAFTS = number(
    80.0,
    "drafts above which the curve's counts fade at a weight sync",
    "a guess: twice the drafts of CURVE_PRIOR_COUNTS",
)
CURVE_MAX_SHARE = number(
    0.98,
    "k of DAS's curve, at most",
    "a guess: a rollout that is drafted in full still takes some rounds",
)


# How sure a model is of its tokens (core/confidence.py)

CONFIDENCE_SLOPE = number(
    0.7,
    "power of a drafter's odds that is assumed to be the odds of acceptance",
    "published drafters are surer than they are right: 0.5 to 1",
)
CONFIDENCE_PRIOR_TOKENS = number(
    4.0,
    "draft tokens of each kind that are assumed at first",
    "a guess: the first real drafts decide",
)
OUTLOOK_DRAFTS = number(
    256,
    "drafts of which the outlook is made, the latest",
    "a guess: enough for a mean, little enough for the host's time",
)
OUTLOOK_NEW_DRAFTS = number(
    8,
    "drafts of a step that are taken into the outlook, at most",
    "a guess: the outlook then spans 32 steps",
)
OUTLOOK_STEPS = number(
    8,
    "decode steps for which an outlook is kept",
    "a guess: a quarter of its drafts are new by then",
)
OUTLOOK_LEVELS = number(
    48,
    "chances for which the outlook is made, at most",
    "a guess: drafts end at about the chance that they should",
)
SURVIVAL_KEPT = number(
    0.99,
    "share of the survival counts that is left after a step",
    "a guess: about the last hundred steps",
)


# What the drafts of a model cost (core/model_drafts.py)

UNSEEN_PASS = number(
    0.4,
    "time of a model's pass before one was timed, as a share of a plain step, without a"
    " roofline",
    "a guess, used until the first pass is timed",
)


# How long a response will be (core/length.py)

LENGTH_PRIOR_RESPONSES = number(
    2.0,
    "responses of its problem as which the lengths of all problems count",
    "benchmarks/results/ablation.json: a problem's own lengths are worth up to 2 %;"
    " the number is a guess: a group of one visit outweighs all problems",
)
LENGTH_SPREAD = number(
    0.25,
    "standard deviation of the logarithm of a length around an observed one",
    "a guess: the next rollout of a problem is about as long",
)
SHORT_QUANTILE = number(
    0.5,
    "quantile of recent lengths up to which a response is short",
    "a guess: DAS, section 4.3, has three classes and names no bounds",
)
LONG_QUANTILE = number(
    0.8,
    "quantile of recent lengths above which a response is long",
    "a guess: DAS, section 4.3, has three classes and names no bounds",
)
POPULATION_VERSIONS = number(
    16,
    "weight versions whose lengths make up those of all problems, the newest",
    "a guess: lengths drift with training",
)
UNKNOWN_LENGTH_TOKENS = number(
    1000.0,
    "tokens that a response is expected to have before any is known",
    "a guess: only its relation to other unknown lengths matters",
)


# How the worth of a token is computed (core/budget.py, core/requests.py)

MAKESPAN_POINTS = number(
    32,
    "numbers of tokens to come at which the requests' lengths are compared",
    "benchmarks/results/ablation.json: the chance to be the last is worth 4 % where"
    " drafts lose on a CPU, and costs up to 3 % with 256 requests on a GPU; the"
    " number is a guess: fine enough",
)
PACE_STEPS = number(
    16,
    "decode steps over which a request's tokens per step are averaged",
    "a guess: longer than a draft, shorter than a rollout",
)


# What a step takes before the first one (core/roofline.py)

ROOFLINE_CONTEXT_TOKENS = number(
    1024.0,
    "tokens of context at which the computing of a token is taken",
    "a guess: between a prompt and a long response",
)
ROOFLINE_DOUBLINGS = number(
    10,
    "doublings of one token up to which steps of a policy with experts are fitted",
    "a guess: steps of 1024 tokens are larger than those of most rollouts",
)


# Where requests run, and in which order (core/routing.py)

DOUBLING_REQUESTS = number(
    64.0,
    "requests that make an empty decode step take twice as long",
    "a guess: between a CPU and a GPU",
)
DOUBLING_TOKENS = number(
    1024.0,
    "tokens in the forward pass that make an empty decode step take twice as long",
    "a guess: between a small and a large GPU",
)
PACE_ALONE = number(
    1.8,
    "tokens that a request gets from a forward pass without siblings and history",
    "a guess: between those of recorded rollouts of code, games and mathematics",
)
PACE_PER_DOUBLING = number(
    0.5,
    "tokens more from a forward pass for twice as much siblings' text",
    "a guess: between those of recorded rollouts of code, games and mathematics",
)
GROWING_SIBLING = number(
    0.2,
    "finished siblings as which a sibling counts that is being written",
    "a guess: a part of its text is there",
)
HISTORY_SIBLINGS = number(
    8.0,
    "finished siblings as which the history of a problem counts",
    "a guess: a group of one visit",
)
REPLICA_QUIET_S = number(
    10.0,
    "seconds without a request after which a replica is lent where trajectories have"
    " several turns",
    "a guess: most tools answer earlier",
)


# Which text is kept (core/history.py, core/length.py)

HISTORY_WINDOW = number(
    8,
    "visits of a problem that are drafted from, the newest: a visit is a weight version"
    " that wrote rollouts of it",
    "benchmarks/results/history.json, `windows`: 16 visits hardly give more accepted"
    " tokens than 8; a run takes 0.50 to 0.52 of the time without drafts with 1, 2, 4"
    " or 8",
)
PROMPTS_SHARE = number(
    32,
    "part of max_bytes, beside it, that the prompts of a node's problems may take",
    "a guess: prompts are shorter than responses, and each is kept once",
)
LENGTHS_WINDOW = number(
    8,
    "visits of a problem whose response lengths are remembered, the newest",
    "a guess: lengths change with the policy",
)

# Which lengths routing expects (verl/router.py)

REQUESTS_PER_LENGTHS = number(
    1024,
    "requests",
    "a guess: after so many requests the ledger is asked for lengths again",
)

# Which lengths an asynchronous run expects (nemo_rl/generation.py)

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

# What an engine drafts from (engine/alone.py, engine/v2)

MAX_LIVE_TOKENS = number(
    2**22,
    "tokens of ended responses at which an engine without a host seals them although"
    " the weights are the same",
    "a guess: live text takes more memory",
)
MEMBER_TEXTS = number(
    64,
    "live texts of a problem that a request on the V2 runner drafts from, the newest",
    "a guess: as many as the largest groups of samples have",
)
CLOSED_TEXTS = number(
    32,
    "texts of ended requests on the V2 runner's device for each request that runs at"
    " once",
    "a guess: all those of a rollout of as many waves",
)
MAX_CLOSED_TEXTS = number(
    8192, "texts of ended requests on the V2 runner's device, at most", "a guess"
)
MISSED_TOKENS = number(
    2048,
    "tokens of all texts that a neural drafter on the V2 runner may miss before it"
    " reads them",
    "a guess: their hidden states take memory",
)

# The suffix index and the store of a node's history (core/index)

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
CPP_NEEDED_LIVE_PLACES = number(
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
    "a guess: as many as HISTORY_WINDOW keeps; benchmarks/results/history.json"
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
CPP_SYNC_TOKENS = number(
    100,
    "tokens of a kind or of a source to which its counts are cut at a weight sync",
    "benchmarks/results/controller_grid.json: a collapse of acceptance is noticed at"
    " once; the number is a guess: an error of about 0.05",
)
CPP_AHEAD_CHANCE = number(
    0.95,
    "prior chance of a token that was written ahead with the request's noise",
    "a guess: the policies differ by one update; benchmarks/results/agreement.json has"
    " how far texts agree after updates of several sizes",
)
CPP_OTHERS_CHANCE = number(
    0.75,
    "chance of a token of the own problem's texts below which texts of other problems"
    " are asked",
    "recorded rollouts of four models: 0.75 drafts as well as 1, and asks a third less",
)
CPP_INLINE_REQUESTS = number(
    4,
    "requests up to which drafting wakes no thread",
    "measured when it was added: waking the thread takes longer than their search, a"
    " V1 step of one request waits 42 us instead of 62",
)

# What the next drafts will be, on vLLM's V2 runner (live_texts.cpp)

FORECAST_KEPT_BATCHES = number(
    8.0,
    "batches as which those before a weight sync count in the average draft, at most",
    "benchmarks/results/controller_grid.json: after a collapse drafts are expected that"
    " are not there; the number is a guess: soon, but not at the first batch",
)

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

OTHERS_TOKENS = number(
    2**21,
    "tokens of the texts that all problems of a node share, at most",
    "a guess: 15 MB on the node, and 17 MB of each GPU",
)
CPP_OTHERS_SEALED_PARTS = number(
    16,
    "parts of the room of these texts, of which one at least is sealed at once before"
    " a weight sync",
    "a guess: small segments would have to be merged again and again",
)
OTHERS_BYTES = number(
    64,
    "bytes of a history's budget for each token of the texts that all problems share",
    "a guess: an eighth of a small budget",
)

CPP_SEGMENTS_PER_PROBLEM = number(
    8,
    "segments of one problem, at most; the oldest go where merging leaves more",
    "a guess: one search visits all of them; 134 million tokens fit",
)
CPP_PROBLEM_BYTES = number(
    480,
    "bytes of memory that each problem of a history takes beside its text; they count"
    " as part of max_bytes",
    "measured: 458 to 479 in the writer with 150,000 problems of 10 tokens, and 306 to"
    " 373 in each engine",
)
CPP_LEAST_PROBLEM_BYTES = number(
    256,
    "bytes of text that each problem keeps before whole problems are dropped",
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
