"""Hold the simulator against the real engine: the controller benchmark's rollouts, from
their own latency models.

    python benchmarks/simulator.py recorded --out FILE.json
        # the result that lies in results/
    python benchmarks/simulator.py routing --traces TRACES_DIR --out FILE.json
        # groups together or scattered
    python benchmarks/simulator.py varied --out FILE.json
        # what changes the answer
    python benchmarks/simulator.py ahead --traces TRACES_DIR --out FILE.json
        # what run-ahead would save

`recorded` takes from the measured run its requests, its arms and the latency model that
its engine had fitted before they began; nothing else, and no time of an arm. The texts
are random tokens, as those of the benchmark's policy are; histories are made from them
by the benchmark's own recipe.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from provenance import provenance, save

from das_adapter.config import parse as parse_das
from das_adapter.core.latency import StepModel, StepTimes
from das_adapter.core.length import RESPONSE
from das_adapter.sim.config import parse
from das_adapter.sim.controlled import Controlled
from das_adapter.sim.drafting import Drafting, no_drafts
from das_adapter.sim.fleet import Fleet
from das_adapter.sim.requests import Requests
from das_adapter.sim.rollouts import RecordedResponse, read
from das_adapter.sim.simulate import Simulation, summary
from das_adapter.sim.sources import Indexed
from das_adapter.sim.steps import Line
from das_adapter.sim.texts import Texts

RESULTS = Path(__file__).parent / "results"
ROUTED: dict[str, tuple[tuple[int, int, int | None], int]] = {
    # problems, samples of a group, steps; seeds
    "code_humaneval_codegen16b_k100": ((96, 8, 3), 2),
    "tot_gpt4_game24_cot_k100": ((96, 8, 3), 2),
    "rl_reasoning_gym_qwen25_3b_k3": ((128, 3, None), 1),
}


def arm_seconds(
    arm: str,
    wanted: list[dict[str, Any]],
    texts: list[np.ndarray],
    model: StepModel,
    bench: Any,
) -> Any:
    """Simulate one arm's rollout on one engine; return seconds, steps, draft tokens and
    accepted ones.
    """
    from controller import MOST, POLICIES

    requests = Requests()
    n = len(wanted)
    rollouts = [
        RecordedResponse(
            q["problem"] + 10**6, 0, 0, np.array(q["prompt"], np.int32), text
        )
        for q, text in zip(wanted, texts, strict=True)
    ]
    columns = {
        "problem": [r.problem for r in rollouts],
        "visit": [1] * n,
        "text": range(n),
        "num_prompt_tokens": [len(q["prompt"]) for q in wanted],
        "num_output_tokens": [len(t) for t in texts],
        "max_tokens": [q["most"] for q in wanted],
    }
    rows = requests.add(
        **{name: np.array(column, dtype=np.int64) for name, column in columns.items()}
    )
    drafting: Drafting = no_drafts(requests)
    if arm != "idle":
        policy = "unlimited"
        max_draft_tokens = MOST
        if arm in POLICIES:
            policy = arm
        else:
            max_draft_tokens = int(arm[1:])
        block = {
            "budget": policy,
            "max_draft_tokens": max_draft_tokens,
            "speculate": "auto" if arm == "optimal" else "always",
        }
        das = parse_das(block)
        source = Indexed(requests, Texts(rollouts), 1, das.history)
        bench.practise(*source.indices, source.remember)
        history = [
            (problem + 10**6, ids, version + 2)
            for problem, ids, version in bench.history(
                wanted, [text.tolist() for text in texts]
            )
        ]
        source.remember(history)
        drafting = Controlled(das, requests, 1, 1024, source)
        (policy,) = drafting.policies
        policy.latency = StepTimes(model)
        policy.weight_sync(
            np.array(
                [
                    (problem, len(ids) // 4, version)
                    for problem, ids, version in history
                ],
                RESPONSE,
            )
        )
    engine = Fleet(1, requests, Line(model), drafting, slots=64)
    engine.submit(rows, rows * 0, rows * 0, 0.0)
    engine.run()
    return {
        "seconds": float(engine.clock[0]),
        "steps": int(engine.step_count[0]),
        "draft_tokens": int(requests.num_drafted.sum()),
        "accepted_tokens": int(requests.num_accepted.sum()),
    }


def compare(measured: dict[str, Any]) -> dict[str, Any]:
    """Simulate a result of `benchmarks/controller.py`, arm by arm."""
    from controller import Bench

    arguments = measured["arguments"]
    model = StepModel(**measured["latency_model"])
    found = []
    for row in measured["rollouts"].values():
        bench = Bench.__new__(Bench)
        bench.seed = 0
        bench.turn = 0
        bench.at_once = arguments["at_once"]
        bench.group = arguments["group"]
        bench.rates = arguments["rates"]
        wanted = bench.requests(row["requests"], arguments["longest"])
        rng = np.random.default_rng(7)
        texts = [rng.integers(1, 32000, q["most"], dtype=np.int32) for q in wanted]
        same = sum(map(len, texts)) == row["tokens"]
        arms = {}
        for arm, measured_arm in row["arms"].items():
            ours = arm_seconds(arm, wanted, texts, model, bench)
            # the model is fitted to medians, not to the fastest
            seconds = float(np.mean(measured_arm["all_seconds"]))
            arms[arm] = {
                "measured": seconds,
                "repeats": measured_arm["all_seconds"],
                "simulated": ours["seconds"],
                "error": ours["seconds"] / seconds - 1,
                "steps": [measured_arm["steps"], ours["steps"]],
                "draft_tokens": [measured_arm["draft_tokens"], ours["draft_tokens"]],
                "accepted_tokens": [
                    measured_arm["accepted_tokens"],
                    ours["accepted_tokens"],
                ],
            }
        order = [
            sorted(arms, key=lambda a: arms[a][kind])
            for kind in ("measured", "simulated")
        ]
        pairs = [
            (a, b)
            for a in arms
            for b in arms
            if arms[a]["measured"] < 0.97 * arms[b]["measured"]
        ]
        found.append(
            {
                "requests": row["requests"],
                "same_requests": same,
                "arms": arms,
                "order": order,
                "pairs_in_order": [
                    sum(arms[a]["simulated"] < arms[b]["simulated"] for a, b in pairs),
                    len(pairs),
                ],
            }
        )
        errors = {a: f"{x['error']:+.0%}" for a, x in arms.items()}
        print(
            row["requests"],
            f"same requests: {same}",
            errors,
            found[-1]["pairs_in_order"],
            flush=True,
        )
    made = {"of": measured["provenance"], "latency_model": measured["latency_model"]}
    return made | {"rollouts": found, "summary": overall(found)}


def overall(rollouts: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum up all comparisons."""
    values = [abs(arm["error"]) for row in rollouts for arm in row["arms"].values()]
    pairs = np.array([row["pairs_in_order"] for row in rollouts])
    return {
        "arms": len(values),
        "mean_error": float(np.mean(values)),
        "largest_error": float(max(values)),
        "within_10_percent": float(np.mean(np.array(values) <= 0.1)),
        "pairs_in_order": pairs.sum(axis=0).tolist(),
    }


def dealt(
    path: Path, problems: int, group: int, steps: int | None, seed: int
) -> list[RecordedResponse]:
    """Choose problems, and deal their samples out in groups, one a step, where the
    recording has no steps.
    """
    found = read(path)
    names = sorted({r.problem for r in found})
    chosen = set(np.random.default_rng(seed).permutation(names)[:problems].tolist())
    found = [r for r in found if r.problem in chosen]
    if steps is None:
        return found
    seen: Counter[int] = Counter()
    rollouts = []
    for r in found:
        step = seen[r.problem] // group
        seen[r.problem] += 1
        if step < steps:
            rollouts.append(replace(r, step=step, run=0))
    return rollouts


def routing(
    traces: Path, name: str, shape: tuple[int, int, int | None], seeds: int
) -> list[dict[str, Any]]:
    """Groups together and longest first, or scattered: seconds of recorded rollouts on
    8 and 64 H100.
    """
    found = []
    for seed, gpus, waves in itertools.product(range(seeds), (8, 64), (1, 2, 4)):
        dump = dealt(traces / f"{name}.npz", *shape, seed)
        size = max(Counter((r.step, r.run) for r in dump).values())
        config = parse(
            {
                "model": "Qwen/Qwen2.5-3B",
                "hardware": {"gpu": "h100", "gpus": gpus},
                "engine": {"max_num_seqs": -(-size // (gpus * waves))},
                "rollout": {"seed": seed},
                "acceptance": {"history": "index"},
                "arms": {
                    "scattered": {"das": {"routing": "least_loaded"}},
                    "longest first": {"das": {}},
                },
            }
        )
        row: dict[str, Any] = {
            "set": name,
            "seed": seed,
            "gpus": gpus,
            "waves": waves,
            "requests": size,
        }
        for arm, run in Simulation(config, dump).run_all().items():
            row[arm] = {
                "rollout_s": sum(s.rollout_s for s in run.steps),
                "tokens_per_forward": (
                    sum(s.tokens for s in run.steps)
                    / sum(s.forwards for s in run.steps)
                ),
                "by_step_s": [s.rollout_s for s in run.steps],
            }
        found.append(row)
        print(
            name,
            seed,
            gpus,
            waves,
            {a: round(row[a]["rollout_s"], 3) for a in config.arms},
            flush=True,
        )
    return found


def varied() -> dict[str, Any]:
    """Return what changes the answer: everything that `would_it_pay.yaml` varies."""
    import yaml
    from published import put

    content = yaml.safe_load(Path(__file__).with_name("would_it_pay.yaml").read_text())
    found: dict[str, Any] = {}
    for what, values in content["vary"].items():
        for value, keys in values.items():
            settings = copy.deepcopy(content["base"])
            for key, setting in keys.items():
                put(settings, key, setting)
            arms = summary(Simulation(parse(settings)).run_all())
            row = {
                "rollout_of_off": arms["history"]["rollout_of_first"],
                "off_s": arms["off"]["rollout_s"],
                "tokens_per_forward": arms["history"]["tokens_per_forward"],
                "by_step": [
                    ours["rollout_s"] / max(off["rollout_s"], 1e-12)
                    for ours, off in zip(
                        arms["history"]["by_step"], arms["off"]["by_step"], strict=True
                    )
                ],
            }
            found.setdefault(what, {})[str(value)] = row
            print(what, value, f"{row['rollout_of_off']:.2f}", flush=True)
    return found


AHEAD = {
    # problems of a step, samples of a group, steps of a visit; policy; GPUs and
    # agreements
    "rl_reasoning_gym_qwen25_3b_k3": (
        (96, 3, 2),
        "Qwen/Qwen2.5-3B",
        {8: (0.9, 0.99, 0.999), 64: (0.99,)},
    ),
    "misguided_attention_k3": (
        (32, 2, 2),
        "Qwen/Qwen3-32B",
        {8: (0.99, 0.999), 64: (0.99,)},
    ),
}
SPREADS = {8: (0.0, 0.4, 0.8, 1.2), 64: (0.0, 0.8)}
"""Standard deviations of the logarithm of drawn lengths, by GPUs."""


def in_visits(
    path: Path, problems: int, group: int, steps: int
) -> list[RecordedResponse]:
    """Choose problems and deal their responses out: a visit of all in some steps, and
    then another, by the recording's own steps where it has several.
    """
    found = dealt(path, problems * steps, 10**9, None, 0)
    numbers = {
        name: i for i, name in enumerate(dict.fromkeys(r.problem for r in found))
    }
    own = sorted({r.step for r in found})
    seen = Counter[tuple[int, int]]()
    rollouts = list[RecordedResponse]()
    for r in found:
        visit = min(own.index(r.step), 1)
        count = seen[r.problem, visit]
        seen[r.problem, visit] += 1
        if len(own) == 1:
            visit, count = divmod(count, group)
        if visit < 2 and count < group:
            rollouts.append(
                replace(r, step=visit * steps + numbers[r.problem] // problems, run=0)
            )
    return rollouts


def ahead_of(
    config: dict[str, Any],
    dump: list[RecordedResponse] | None,
    first: int,
    agreements: tuple[float, ...],
) -> list[dict[str, Any]]:
    """Simulate without drafts, with the history and, for each agreement, with
    run-ahead: what first visits, up to step `first` but for the first of all, and later
    ones take.
    """
    drafts: dict[str, Any] = {"stride": 16} if dump is None else {}
    arms = {"off": {"das": {"drafter": "none"}}, "history": drafts}
    ahead = {"ahead": {"das": {"history": {"run_ahead": "auto"}}, **drafts}}
    runs = Simulation(parse({**config, "arms": arms}), dump).run_all()
    rows = []
    for chance in agreements:
        accept = {**config.get("acceptance", {}), "agreement": chance}
        runs |= Simulation(
            parse({**config, "acceptance": accept, "arms": ahead}), dump
        ).run_all()
        rows.append({"agreement": chance})
        for visit, part in (("first", slice(1, first)), ("later", slice(first, None))):
            steps = {name: run.steps[part] for name, run in runs.items()}
            if steps["off"]:
                rows[-1][visit] = compared(steps)
    return rows


def compared(steps: dict[str, Any]) -> dict[str, float]:
    """Compare the steps of `off`, `history` and `ahead`."""
    off, history, ahead = (
        sum(step.rollout_s for step in steps[arm])
        for arm in ("off", "history", "ahead")
    )
    return {
        "idle": float(np.mean([step.idle for step in steps["history"]])),
        "written_ahead": (
            sum(s.ahead for s in steps["ahead"]) / sum(s.tokens for s in steps["ahead"])
        ),
        "history_of_off": history / off,
        "ahead_of_off": ahead / off,
        "ahead_of_history": ahead / history,
        "forwards_of_off": (
            sum(s.forwards for s in steps["ahead"])
            / sum(s.forwards for s in steps["off"])
        ),
    }


def ahead(traces: Path) -> dict[str, Any]:
    """Return what run-ahead saves where lengths spread, and what it costs where they do
    not; drawn and recorded rollouts.
    """
    found: dict[str, list[Any]] = {"drawn": [], "recorded": []}
    for gpus, spreads in SPREADS.items():
        for sigma in spreads:
            problems = 64 if gpus == 8 else 256
            rollout = {
                "dataset": 4 * problems,
                "problems": problems,
                "samples": 8,
                "cap": 8192,
                "steps": 4,
            }
            lengths = {"mean": 2000, "sigma": max(sigma, 1e-6)}
            config = {
                "hardware": {"gpu": "h100", "gpus": gpus},
                "rollout": {**rollout, "lengths": lengths},
            }
            found["drawn"] += [
                {"gpus": gpus, "spread": sigma, **row}
                for row in ahead_of(config, None, 4, (0.99,))
            ]
            print(found["drawn"][-1], flush=True)
    for name, (shape, model, agreements) in AHEAD.items():
        dump = in_visits(traces / f"{name}.npz", *shape)
        for gpus, chances in agreements.items():
            hardware = {
                "gpu": "h100",
                "gpus": gpus,
                "per_engine": 2 if "32B" in model else 1,
            }
            config = {
                "model": model,
                "hardware": hardware,
                "acceptance": {"history": "index"},
            }
            found["recorded"] += [
                {"set": name, "gpus": gpus, **row}
                for row in ahead_of(config, dump, shape[2], chances)
            ]
            print(found["recorded"][-len(chances) :], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["recorded", "routing", "varied", "ahead"])
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    result: dict[str, Any] = {"provenance": provenance()}
    if args.what == "varied":
        result["drawn"] = varied()
    elif args.what == "ahead":
        result |= ahead(args.traces)
    elif args.what == "routing":
        result["rows"] = [
            row
            for name, (shape, seeds) in ROUTED.items()
            for row in routing(args.traces, name, shape, seeds)
        ]
    else:
        result |= compare(json.loads((RESULTS / "controller.json").read_text()))
        print(result["summary"])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save(args.out, result)


if __name__ == "__main__":
    main()
