"""Each request's own number of draft tokens against one length for all, on the V2
runner, in simulated H100 steps.

PYTHONPATH=.venv/newest python benchmarks/v2_lengths.py --out FILE.json

The host's part is the engine's own (`engine/v2/step_planner.py`): it is told of drafts
when the runner would tell it, and chooses for steps whose drafts do not exist yet. The
device's part and the time are simulated: it verifies the first tokens of each draft,
or, with own numbers, those of greatest chance times worth; a step takes what the
roofline says of the policy's shape, for the tokens of the CUDA graph that it replays:
vLLM captures them for 256 requests. Responses are long-tailed. A quarter of the
requests have no history; that of the others is their text with mistakes, in stretches
of 16 tokens at one rate of 2 to 40 %, and finds nothing for 2 tokens after a mistake.

`oracle` is who has own lengths, and knows the true chances of this very step's drafts:
it takes as many tokens as give the most text in a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import graphs
import numpy as np
import torch
from provenance import provenance, save
from vllm.config import CUDAGraphMode

from das_adapter.config import DasConfig, parse
from das_adapter.core import tuning
from das_adapter.core.hardware import DEVICES
from das_adapter.core.latency import StepModel
from das_adapter.core.roofline import Roofline
from das_adapter.engine.plan import DraftPlan
from das_adapter.engine.requests import LiveRequest
from das_adapter.engine.v2.step_planner import Output, Step, StepPlanner
from das_adapter.protocol.messages import Refresh
from das_adapter.sim.models import sizes

MOST = 16
STRETCH = 16
BLIND = 2
PROMPT = 100
LONGEST = 3000
MEDIAN = 400
SPREAD = 0.8
RATES = (0.02, 0.05, 0.1, 0.2, 0.4)
REQUESTS = 256
"""Requests of an engine at once, at most."""
ROLLOUTS = 4
"""Rollouts, of which the first is not counted: the engine learns in it the times of
steps.
"""


class Text:
    """A response, and what its history says of each token."""

    def __init__(
        self,
        rng: np.random.Generator,
        length: int | None = None,
        rates: Sequence[float] = RATES,
        unknown: float = 0.25,
    ) -> None:
        """`length`: tokens, None: as the distribution says; `rates`: of mistakes;
        `unknown`: chance of no history.
        """
        self.length = length or int(
            min(LONGEST, np.exp(rng.normal(np.log(MEDIAN), SPREAD)) + 10)
        )
        rates = np.repeat(rng.choice(rates, self.length // STRETCH + 2), STRETCH)
        self.chance = (1.0 - rates).astype(np.float32)
        self.right = rng.random(len(self.chance)) >= rates
        self.known = rng.random() >= unknown
        self.at = 0

    def draft(self) -> np.ndarray:
        """Return the chance of each token of the draft here, given those before it,
        float32 [n].
        """
        blind = (
            not self.known or not self.right[max(0, self.at - BLIND) : self.at].all()
        )
        return self.chance[self.at : self.at + (0 if blind else MOST)]

    def write(self, drafted: int) -> int:
        """Verify so many tokens of the draft here; return how many tokens are
        written.
        """
        right = self.right[self.at : self.at + drafted]
        got = min(int(np.append(right, False).argmin()) + 1, self.length - self.at)
        self.at += got
        return got


class Engine:
    """An engine on the V2 runner, as its host sees it."""

    def __init__(self, own: bool, model: StepModel, **das: Any) -> None:
        config = parse({"drafter": "history", "max_draft_tokens": MOST} | das)
        vllm_config: Any = SimpleNamespace(
            model_config=SimpleNamespace(
                max_model_len=8192,
                get_vocab_size=lambda: 100,
                enforce_eager=not model.sizes,
                quantization=None,
            ),
            compilation_config=SimpleNamespace(
                cudagraph_mode=CUDAGraphMode.FULL, cudagraph_capture_sizes=model.sizes
            ),
        )
        self.planner = StepPlanner(config, vllm_config)
        self._own = own
        self._model = model
        self.now = 0.0
        self._aborted: set[str] = set()
        if own:
            self.planner.give_own_lengths(model.drafted_sizes or ())

    def rollout(
        self, number: int, texts: Sequence[Text], at_once: int | None = None
    ) -> float:
        """Write all texts; return the seconds. `at_once`: so many at a time, until none
        waits any more.
        """
        began = self.now
        chosen = [DraftPlan()] * 2
        scheduled = DraftPlan()
        waiting = list(enumerate(texts))
        live = dict[str, Text]()
        ended = self._aborted
        offers: dict[str, np.ndarray] = {}
        while waiting or (live and at_once is None):
            room = (at_once or len(texts)) - len(live)
            joined = waiting[:room]
            waiting = waiting[room:]
            begun = [_begun(f"{number} {i}", i, text) for i, text in joined]
            live |= {
                one.req_id: text for one, (_, text) in zip(begun, joined, strict=True)
            }
            given = self._given(list(live), offers, scheduled)
            step = Step(
                begun, frozenset(ended), given, True, self.now, req_ids=list(live)
            )
            if self._own:
                step.admitted = np.array(list(given.values()))
            tokens = len(live) + sum(given.values())
            self.now += self._model.step(tokens, len(live), tokens > len(live))
            # no fillers
            real = {
                req_id: min(count, len(offers.get(req_id, ())))
                for req_id, count in given.items()
            }
            got = [text.write(real[req_id]) for req_id, text in live.items()]
            scheduled = chosen[0]
            offers = self._draft(live, scheduled, step)
            self.planner.count_last()
            output = Output(step, [[1] * count for count in got], self.now)
            chosen = [chosen[1], self.planner.process_output(output)]
            ended = {req_id for req_id, text in live.items() if text.at >= text.length}
            live = {
                req_id: text for req_id, text in live.items() if req_id not in ended
            }
        self._aborted = set(live)
        self.planner.refresh(Refresh(version=number + 1))
        return self.now - began

    def _draft(
        self, live: dict[str, Text], chosen: DraftPlan, step: Step
    ) -> dict[str, np.ndarray]:
        """Return the chances of each request's draft at the end of a step, as
        `Text.draft`, and tell the host.
        """
        offers = {
            r: text.draft() if chosen.looks_up else np.zeros(0, np.float32)
            for r, text in live.items()
        }
        step.offer = _offer(list(offers.values())) if chosen.looks_up else None
        return offers

    def _given(
        self, req_ids: list[str], offers: dict[str, np.ndarray], chosen: DraftPlan
    ) -> dict[str, int]:
        """Return how many draft tokens of each request the step verifies."""
        if not self._own:
            return dict.fromkeys(req_ids, chosen.num_draft_tokens)
        longest, dear, _ = chosen.limits_and_worth(req_ids)
        most = np.minimum(longest, chosen.num_draft_tokens).tolist()
        worth = np.zeros((len(req_ids), MOST))
        for row, (req_id, limit) in enumerate(zip(req_ids, most, strict=True)):
            chances = offers.get(req_id, np.zeros(0))[:limit]
            worth[row, : len(chances)] = np.cumprod(chances) * float(dear[row])
            worth[row, limit:] = -1.0
        total = min(chosen.budget, sum(most))
        rows = np.argsort(-worth, axis=None, kind="stable")[:total] // MOST
        return dict(
            zip(
                req_ids, np.bincount(rows, minlength=len(req_ids)).tolist(), strict=True
            )
        )


def _begun(req_id: str, problem: int, text: Text) -> LiveRequest:
    return LiveRequest(
        req_id,
        problem,
        PROMPT,
        PROMPT + text.length,
        True,
        length=PROMPT,
        stops=frozenset([2]),
    )


def _offer(drafts: list[np.ndarray]) -> Any:
    chances = torch.zeros(len(drafts), MOST)
    for row, draft in enumerate(drafts):
        chances[row, : len(draft)] = torch.from_numpy(draft)
    lengths = torch.tensor([len(draft) for draft in drafts], dtype=torch.int32)
    return SimpleNamespace(
        lengths=lengths,
        chances=chances,
        by_model=torch.zeros(len(drafts), dtype=torch.int64),
    )


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
    engine = Engine(own, model, **das)
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
