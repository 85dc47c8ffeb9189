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


# How much is drafted, and for whom (core/controller.py)

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

MARGIN = number(
    0.05,
    "predicted gain, as a share of a step's time, at which drafting begins",
    "a guess: the latency model errs by some percent, and a smaller gain would switch"
    " drafting to and fro",
)
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
    "on modelled engines a shorter wait never paid; no result file",
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
    "a guess: by so much may the predicted time of plain steps be wrong",
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
    "a guess: a rollout that tries drafts again may lose",
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
REFIT_USUAL_STEPS = number(
    16,
    "decode steps until the second fit where predictions are right; then they double",
    "a guess: the first steps are of few kinds",
)
REFIT_STEPS = number(
    4096,
    "decode steps after which the model is fitted again, at the latest",
    "a guess: longer than most rollouts",
)
LAUNCH_S = number(
    0.005,
    "seconds that a step takes longer whose kernels are launched one by one, until"
    " such a step was seen",
    "a guess: steps within the graphs do not tell",
)
KNEES = number(
    (4, 8, 16, 32, 64, 128, 256, 512),
    "tokens in a step at which a fitted curve may bend",
    "a guess: powers of two, as far as steps usually reach",
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
    "a guess: a group of one visit outweighs them",
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
    "a guess: geometric steps, fine enough for the chance to be the last",
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
    "visits of a problem that are drafted from and whose lengths are remembered, the"
    " newest: a visit is a weight version that wrote rollouts of it",
    "benchmarks/results/history.json, `windows`: 16 visits hardly give more accepted"
    " tokens than 8; a run takes 0.50 to 0.52 of the time without drafts with 1, 2, 4"
    " or 8",
)
