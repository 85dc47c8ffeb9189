"""Each request's own number of draft tokens against one length for all, on the V2
runner, in simulated H100 steps.

PYTHONPATH=.venv/newest python benchmarks/v2_lengths.py --out FILE.json

The engine is that of `modelled.py`: the host's part is the package's own
(`engine/v2/step_planner.py`), told of drafts when the runner would tell it, so that it
chooses for steps whose drafts do not exist yet. A step takes what the
roofline says of the policy's shape, for the tokens of the CUDA graph that it replays:
vLLM captures them for 256 requests. Responses are long-tailed. A quarter of the
requests have no history; that of the others is their text with mistakes, in stretches
of 16 tokens at one rate of 2 to 40 %, and finds nothing for 2 tokens after a mistake.

`oracle` is who has own lengths, and knows the true chances of this very step's drafts:
it takes as many tokens as give the most text in a second.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import graphs
import numpy as np
from modelled import MEDIAN, MOST, PROMPT, EngineV2, Text
from provenance import provenance, save
from vllm.config import CUDAGraphMode

from das_adapter.config import DasConfig
from das_adapter.core import tuning
from das_adapter.core.hardware import DEVICES
from das_adapter.core.latency import StepModel
from das_adapter.core.roofline import Roofline
from das_adapter.sim.models import sizes

REQUESTS = 256
"""Requests of an engine at once, at most."""
ROLLOUTS = 4
"""Rollouts, of which the first is not counted: the engine learns in it the times of
steps.
"""


def captured(model: StepModel) -> list[StepModel]:
    """Return a model with the sizes of the CUDA graphs that vLLM captures: off, with
    one length, with own lengths.
    """
    from das_adapter.engine.v2.admission import capture_plain_steps
    from das_adapter.protocol.engine_args import v2_speculative_config

    capture_plain_steps.apply()
    speculative = v2_speculative_config(DasConfig(max_draft_tokens=MOST))
    ways = (None, False), (speculative, False), (speculative, True)
    engines = [graphs.manager(REQUESTS, *way) for way in ways]
    captures = [
        tuple(sorted(engine.compilation_config.cudagraph_capture_sizes))
        for engine in engines
    ]
    off, one, own = (
        replace(model, sizes=each, launch=tuning.LAUNCH_S) for each in captures
    )
    drafted = {
        d.num_tokens
        for d in engines[-1]._capture_descs[CUDAGraphMode.FULL]
        if d.max_query_len
    }
    return [off, one, replace(own, drafted_sizes=tuple(sorted(drafted)))]


def oracle(texts: list[Text], model: StepModel) -> float:
    """Return the seconds of a rollout in which each step's draft tokens are chosen by
    their own chances.
    """
    live = texts
    taken = 0.0
    while live:
        reached = np.zeros((len(live), MOST))
        for row, text in enumerate(live):
            chances = text.draft()
            reached[row, : len(chances)] = np.cumprod(chances)
        best = np.sort(reached[reached > 0.0])[::-1]
        drafted = np.arange(len(best) + 1)
        times = model.seconds(len(live) + drafted, len(live), drafted > 0)
        most = int(((len(live) + np.append(0.0, best).cumsum()) / times).argmax())
        rows = np.argsort(-reached, axis=None, kind="stable")[:most] // MOST
        for text, drafts in zip(
            live, np.bincount(rows, minlength=len(live)).tolist(), strict=True
        ):
            text.write(drafts)
        taken += float(times[most])
        live = [text for text in live if text.at < text.length]
    return taken


def plain(texts: list[Text], model: StepModel) -> float:
    """Return what vLLM takes without drafts."""
    left = np.sort([text.length for text in texts])
    running = len(left) - np.searchsorted(left, np.arange(left[-1]), side="right")
    return float(model.plain_seconds(running).sum())


def seconds(requests: int, model: StepModel, own: bool, **das: Any) -> float:
    """Return what the counted rollouts of a batch take."""
    engine = EngineV2(own, model, **das)
    return sum(
        [engine.rollout(n, batch) for n, batch in enumerate(batches(requests))][1:]
    )


def batches(requests: int) -> list[list[Text]]:
    """Return the texts of all rollouts."""
    rng = np.random.default_rng(requests)
    return [[Text(rng) for _ in range(requests)] for _ in range(ROLLOUTS)]


@click.command()
@click.option("--out", type=click.Path(path_type=Path))
@click.option("--requests", multiple=True, type=int, default=(8, 30, 56, 64, 100, 256))
@click.option(
    "--policy", multiple=True, default=("Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-7B")
)
@click.option("--budget", multiple=True, default=("optimal", "das"))
def main(
    out: Path | None,
    requests: tuple[int, ...],
    policy: tuple[str, ...],
    budget: tuple[str, ...],
) -> None:
    """Write a row for each budget, policy and batch."""
    rows: dict[str, list[Any]] = {kind: [] for kind in budget}
    for name in policy:
        without, one, own = captured(
            Roofline.from_config(sizes(name), DEVICES["h100"])
            .step_model()
            .at_context(PROMPT + MEDIAN)
        )
        for count in requests:
            off = sum(plain(texts, without) for texts in batches(count)[1:])
            best = sum(oracle(texts, own) for texts in batches(count)[1:])
            for kind in budget:
                took = {
                    "one": seconds(count, one, False, budget=kind),
                    "own": seconds(count, own, True, budget=kind),
                    "oracle": best,
                }
                of_off = {way: each / off for way, each in took.items()}
                rows[kind].append({"policy": name, "requests": count, **of_off})
                print(kind, rows[kind][-1], flush=True)
    if out is not None:
        save(out, {"provenance": provenance(), "time_of_off": rows})


if __name__ == "__main__":
    main()
