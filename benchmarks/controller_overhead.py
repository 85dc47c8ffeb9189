"""Measure the processor time of V1's proposer in one decode step, and of V2's choice of
plans, with that of the policy of drafts, by batch size.

    python benchmarks/controller_overhead.py [--out FILE.json]

The proposer drafts for requests whose texts agree with their siblings' and their
history in nine tokens of ten. A step waits for what it does before a forward pass,
after it and when its drafts are taken, and for the search: that of more than four
requests, as far as it outlasts vLLM's scheduler. Shares are of an H100's roofline step
of the 1.5B shape at a context of 2048 tokens.

On V2 the requests are those of `modelled.py`, with texts of one length:
`process_output` takes what a step brought and plans, `count_last` learns from it while
the device works. Of both, `core` is what the policy takes, `record_offers` and
`process_tokens` what the live texts take. All figures are of the quietest of three
rounds.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from own_history import OwnHistory

from das_adapter.core.hardware import DEVICES
from das_adapter.core.latency import StepModel, StepTimes
from das_adapter.core.roofline import Roofline

BATCHES = (1, 8, 64, 256)
GROUP = 8
CONTEXT = 2048
VOCABULARY = 151936
STEPS = 300
CORE = "next", "choose", "flush", "timed"
TEXTS = (
    "record_offers",
    "process_tokens",
    "process_single_tokens",
    "forecast_drafts",
)
CHEAP = StepModel(base=0.008, token=8e-6)
"""Seconds of a step on V2, in which most drafts are worth verifying at each of the
batch sizes.
"""
SCHEDULER_US = 5.0
"""Time of vLLM's scheduler for a request, after a step and before its drafts are taken:
1.36 ms for 256 on vLLM 0.27.1.
"""


def proposer(
    texts: np.ndarray,
    problems: list[int],
    past: list[tuple[int, np.ndarray]],
    roof: Roofline,
) -> Any:
    """V1's proposer for requests with these texts, whose problems have a history, on
    that roofline.
    """
    from vllm import SamplingParams

    from das_adapter.engine.requests import LABEL
    from das_adapter.engine.v1.proposer import Proposer
    from das_adapter.protocol.engine_args import SETTINGS_KEY
    from das_adapter.protocol.label import Label

    model = {
        "max_model_len": texts.shape[1],
        "get_vocab_size": lambda: VOCABULARY,
        "enforce_eager": True,
    }
    vllm_config: Any = SimpleNamespace(
        additional_config={SETTINGS_KEY: {"drafter": "history"}},
        speculative_config=object(),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=16384),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0),
        model_config=SimpleNamespace(**model, quantization="unknown"),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
    )
    drafter = Proposer(vllm_config)
    params = SamplingParams(max_tokens=None)
    drafter.engine.policy.latency = StepTimes(roof.step_model())
    requests = {
        str(i): SimpleNamespace(
            prompt_token_ids=text[:8].tolist(),
            sampling_params=params,
            **{LABEL: Label(problem)},
        )
        for i, (problem, text) in enumerate(zip(problems, texts, strict=True))
    }
    drafter.runner = SimpleNamespace(
        requests=requests, input_batch=SimpleNamespace(req_ids=list(requests))
    )
    drafter.engine.history.index = index = OwnHistory()
    for problem, text in past:
        index.add(problem, text, 0)
    index.seal()
    return drafter


def propose(batch: int) -> dict[str, float]:
    """Microseconds for which a step waits, and their share of it."""
    from das_adapter.bench.engines import SHAPES

    rng = np.random.default_rng(batch)
    roof = Roofline.from_config(SHAPES["1.5b"], DEVICES["h100"])
    problems = [i // GROUP for i in range(batch)]
    poems = rng.integers(
        0, VOCABULARY, (problems[-1] + 1, CONTEXT + 8 * STEPS), dtype=np.int32
    )

    def varied(problem: int) -> np.ndarray:
        other = rng.integers(0, VOCABULARY, poems.shape[1], dtype=np.int32)
        return np.where(rng.random(poems.shape[1]) < 0.1, other, poems[problem])

    texts = np.stack([varied(p) for p in problems])
    past = [(p, varied(p)) for p in range(len(poems)) for _ in range(8)]
    drafter = proposer(texts, problems, past, roof)
    lengths = rng.integers(CONTEXT // 2, CONTEXT, batch)
    now = 0.0
    drafts: list[list[int]] = [[] for _ in problems]
    rows = []
    hidden = 1e-6 * SCHEDULER_US * batch * (batch > 4)
    while lengths.max() + 20 < texts.shape[1]:
        carried = [len(draft) for draft in drafts]
        scheduled = SimpleNamespace(
            num_scheduled_tokens={str(i): 1 + n for i, n in enumerate(carried)},
            scheduled_new_reqs=[],
            scheduled_spec_decode_tokens={
                str(i): draft for i, draft in enumerate(drafts) if draft
            },
            total_num_scheduled_tokens=batch + sum(carried),
        )
        seconds = float(
            roof.seconds(batch, float(lengths.mean()), sum(carried) / batch)
        )
        clock = [time.thread_time()]
        drafter.begin_step(scheduled, now)
        clock.append(time.thread_time())
        drafter.catch_up()  # while the forward pass runs
        right = [
            texts[i, at : at + n] == drafts[i]
            for i, (at, n) in enumerate(zip(lengths, carried, strict=True))
        ]
        got = [int(np.append(agrees, False).argmin()) + 1 for agrees in right]
        sampled = [
            texts[i, at : at + n].tolist()
            for i, (at, n) in enumerate(zip(lengths, got, strict=True))
        ]
        lengths = lengths + got
        now = now + seconds
        drafter.carried = carried if any(carried) else None
        clock.append(time.thread_time())
        drafts = drafter.propose(sampled, lengths, texts)
        clock.append(time.thread_time())
        # waits for the search
        begin = time.process_time()
        _ = drafter.engine.history.index.generation
        search = time.process_time() - begin
        settled = time.thread_time()
        drafter.emit_drafts()
        own = clock[1] - clock[0] + clock[3] - clock[2] + time.thread_time() - settled
        rows.append((1e6 * (own + max(0.0, search - hidden)), 1e6 * own, 1e6 * seconds))
    assert not drafter.engine.failed
    waited, own, step = np.array(rows[3:]).T
    return {
        "waited_p50_us": float(np.median(waited)),
        "without_search_p50_us": float(np.median(own)),
        "step_p50_us": float(np.median(step)),
        "share_p50": float(np.median(waited / step)),
        "share": float(waited.sum() / step.sum()),
    }


def clocked(owner: Any, names: Iterable[str], spent: dict[str, float]) -> None:
    """Have what these methods take added to `spent`, microseconds by name."""
    for name in names:
        stock = getattr(owner, name)

        def call(
            *args: Any, name: str = name, stock: Any = stock, **kwargs: Any
        ) -> Any:
            begin = time.thread_time()
            answer = stock(*args, **kwargs)
            spent[name] = spent.get(name, 0.0) + 1e6 * (time.thread_time() - begin)
            return answer

        setattr(owner, name, call)


def choose(batch: int, unknown: float) -> list[dict[str, float]]:
    """Return what the parts of each step took, microseconds; `unknown`: share of texts
    without a history.
    """
    from modelled import EngineV2, Text

    engine = EngineV2(True, CHEAP)
    rng = np.random.default_rng(batch)
    planner = engine.planner
    rows = list[dict[str, float]]()
    spent = dict[str, float]()
    clocked(planner.engine.policy, CORE, spent)
    clocked(planner.texts, TEXTS, spent)
    clocked(planner, ("count_last", "process_output"), spent)
    stock = planner.process_output

    def process_output(output: Any) -> Any:
        answer = stock(output)
        step = output.step
        if len(step.req_ids) == batch:
            rows.append(
                {
                    "drafts": sum(step.drafts.values()),
                    "got": sum(map(len, output.sampled)),
                    **spent,
                }
            )
        spent.clear()
        return answer

    planner.process_output = process_output
    # it learns what steps cost
    engine.rollout(0, [Text(rng) for _ in range(batch)])
    rows.clear()
    engine.rollout(
        1,
        [Text(rng, 1000, (0.02, 0.05, 0.1, 0.2), unknown) for _ in range(batch)],
    )
    assert not planner.engine.failed
    return rows[30:]


def chosen(batch: int) -> dict[str, float]:
    """Microseconds of a step that drafts, of its parts, and of one of a resting
    engine.
    """
    every = choose(batch, 0.0)
    resting = choose(batch, 1.0)
    drafting = [row for row in every if row["drafts"]]
    assert drafting, "no step has drafted: the drafter has failed"

    def of(rows: list[dict[str, float]], *names: str) -> Any:
        return np.array([sum(row.get(name, 0.0) for name in names) for row in rows])

    found = {}
    for name, parts in {"": ("process_output", "count_last"), "core_": CORE}.items():
        took = of(drafting, *parts)
        found |= {
            f"{name}mean_us": float(took.mean()),
            f"{name}p50_us": float(np.median(took)),
        }
    for name in ("process_output", "count_last", *TEXTS):
        found[f"{name}_p50_us"] = float(np.median(of(drafting, name)))
    rest = of(resting, "process_output", "count_last")
    return found | {
        "drafted_share": len(drafting) / len(every),
        "accepted_share": float(
            (of(drafting, "got").sum() - batch * len(drafting))
            / of(drafting, "drafts").sum()
        ),
        "resting_mean_us": float(rest.mean()),
        "resting_p50_us": float(np.median(rest)),
    }


def quietest(
    measured: Callable[[int], dict[str, float]], by: str
) -> dict[int, dict[str, float]]:
    """Measure all batches three times, one after the other; return the least figures of
    each, by one of them.
    """
    runs = [{batch: measured(batch) for batch in BATCHES} for _ in range(3)]
    return {
        batch: min((run[batch] for run in runs), key=lambda row: row[by])
        for batch in BATCHES
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from provenance import provenance, save

    propose(1)  # imports what it needs
    gc.collect()
    gc.freeze()  # as vLLM does in a worker that has warmed up
    proposers = quietest(propose, "waited_p50_us")
    outputs = quietest(chosen, "p50_us")
    for name, found in {"proposer": proposers, "output": outputs}.items():
        for batch, row in found.items():
            print(
                f"{name}, batch {batch:4}: "
                + ", ".join(f"{k} {v:.3g}" for k, v in row.items())
            )
    if args.out:
        parts = {"proposer_of_h100_step": proposers, "output_us_per_step": outputs}
        save(args.out, {"provenance": provenance(), **parts})


if __name__ == "__main__":
    main()
