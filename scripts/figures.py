"""The figures of the pages, from benchmarks/results/; `python scripts/reference.py`
writes them.

`<!-- figure FILE PATH FORMAT -->…<!-- end -->` on a page is the value at PATH of a
result: keys with dots between them, `*` for all entries. Several values are written one
after the other, after `range` as the least and the greatest; `A of B` is a quotient,
entry by entry. FORMAT is Python's, and may end with `M` (millions), `min` (of seconds),
or, for a share of time, `x` (how many times as fast), `less` or `more`. FILE may also
be `trainings`, which sums up several results. `<!-- made FILE NAME -->…<!-- end -->` is
the version of a package with which a result was made, or its `processor`. `<!-- table
NAME -->` begins a table, of those in `TABLES`.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "examples" / "verl"), str(ROOT / "benchmarks")]
import demo  # noqa: E402
from stale import origin  # noqa: E402

from das_adapter.reports.compare import CLAIM_ERROR, num_near  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKED = re.compile(
    r"(<!-- figure (\S+) (range )?([^\n]+?)(?: of ([^\n]+?))? (\S+) -->).*?(<!-- end"
    r" -->)"
)
MADE = re.compile(r"(<!-- made (\S+) (\S+) -->).*?(<!-- end -->)")
TABLE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SHOWN: dict[str, tuple[Callable[[float], float], str]] = {
    "": (lambda value: value, ""),
    "M": (lambda value: value / 1e6, ""),
    "min": (lambda value: value / 60, ""),
    "x": (lambda ratio: 1 / ratio, "x"),
    "less": (lambda ratio: 1 - ratio, ""),
    "more": (lambda ratio: ratio - 1, ""),
}


def update(text: str) -> str:
    """Return a page with its figures as the result files have them."""
    text = MARKED.sub(_figure, text)
    text = MADE.sub(_made, text)
    return TABLE.sub(
        lambda mark: mark[1] + _rows(TABLES[mark[2]]()) + mark[3],
        text,
    )


def result(name: str) -> Any:
    """Read a result of benchmarks/results/, or sum up those of trainings."""
    if name == "trainings":
        return trainings()
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def values(content: Any, path: str) -> list[float]:
    """Return the numbers at a path, in the order of the file.

    Raises:
        KeyError, IndexError: the file has nothing there.
    """
    found = [content]
    for key in path.split("."):
        if key == "*":
            found = [
                entry
                for value in found
                for entry in (value.values() if isinstance(value, dict) else value)
            ]
        else:
            found = [
                value[int(key)] if isinstance(value, list) else value[key]
                for value in found
            ]
    return [
        number
        for value in found
        for number in (value if isinstance(value, list) else [value])
        if number is not None
    ]


TRAININGS = {
    "demo.json": "veRL, `make demo`",
    "demo_intel.json": "veRL, `make demo`",
    "epochs.json": "veRL, 100 problems",
    "epochs_intel.json": "veRL, 100 problems",
    "nemo_rl.json": "NeMo-RL, 16 problems",
    "nemo_rl_intel.json": "NeMo-RL, 16 problems",
    "trl.json": "TRL, 16 problems",
}
"""Trainings of which the rollout time was measured beside that without speculation."""


def by_epoch(name: str) -> list[float]:
    """Return the rollout time of a training by epoch, relative to the one without
    speculation.
    """
    content = result(name)
    if "epochs_of_off" in content:
        return values(content, "epochs_of_off.*.rollout_s")
    if "rows" in content["comparison"]:
        return [of / off for off, of in values_of_rows(content)]
    return values(content, "comparison.history.rollout_ratio_by_epoch")


def values_of_rows(content: Any) -> list[list[float]]:
    """Return the rollout seconds of each row of a comparison, without speculation and
    with it.
    """
    return [row["rollout_s"] for row in content["comparison"]["rows"]]


def trainings() -> dict[str, Any]:
    """Return how many trainings there are, and their rollout times relative to those
    without speculation: in the first epoch, and the mean of the later ones.
    """
    ratios = [by_epoch(name) for name in TRAININGS]
    by_run = {
        "first": [epochs[0] for epochs in ratios],
        "later": [statistics.mean(epochs[1:]) for epochs in ratios],
    }
    summary: dict[str, Any] = {"runs": len(ratios)}
    for epochs, times in by_run.items():
        summary[epochs] = {"by_run": times, "median": statistics.median(times)}
    return summary


def _trainings() -> dict[str, Iterable[Any]]:
    """Return the columns of the table of trainings: a row per result."""
    made = {name: origin(result(name)) for name in TRAININGS}
    ratios = [by_epoch(name) for name in TRAININGS]
    return {
        "training": TRAININGS.values(),
        "processor": [processor(of) for of in made.values()],
        "rollout time of off, by epoch": [
            " / ".join(f"{ratio:.2f}" for ratio in epochs) for epochs in ratios
        ],
        "`das/of_stock` of measured: median; within 10 % / 20 %": [
            _right_claims(claims_of(name)) for name in TRAININGS
        ],
        "file": [f"`{name}`" for name in TRAININGS],
    }


def claims_of(name: str) -> list[float]:
    """Return what a training's steps said of their rollout time relative to stock's, as
    a share of the measured ratio, where it was known.
    """
    content = result(name)
    found = content.get("claims", content.get("comparison", {}).get("claims"))
    if found is None:
        history = content["comparison"].get("history", {})
        found = history.get("claimed_of_measured", [])
    return [share for share in found if share is not None]


def _right_claims(shares: list[float]) -> str:
    """Say how many of the claims are right; empty: there are none."""
    if not shares:
        return ""
    near = num_near(shares)
    nearly = num_near(shares, 2 * CLAIM_ERROR)
    middle = statistics.median(shares)
    return f"{middle:.2f}; {near} / {nearly} of {len(shares)} steps"


def _demo() -> dict[str, Iterable[Any]]:
    """Return the columns of the demo's table: a row per epoch."""
    content = result("demo.json")
    count = content["epochs"]
    arms = content["arms"]
    steps = len(arms["off"]["reward"]) / count
    seconds = {
        arm: [steps * mean for mean in demo.by_epoch(arms[arm]["rollout_s"], count)]
        for arm in arms
    }
    return {
        "epoch": range(1, count + 1),
        "reward": [
            f"{value:.2f}" for value in demo.by_epoch(arms["off"]["reward"], count)
        ],
        "off: rollout s": [f"{value:.2f}" for value in seconds["off"]],
        "history: rollout s": [f"{value:.2f}" for value in seconds["history"]],
        "history: of off": [
            f"{value:.2f}"
            for value in content["comparison"]["history"]["rollout_ratio_by_epoch"]
        ],
        "history: tokens per forward": [
            f"{value:.2f}" for value in demo.tokens_per_forward(arms["history"], count)
        ],
    }


def drafters() -> dict[str, dict[str, float]]:
    """Return the rollout time of each drafter relative to off, of both visits together,
    by cell: tokens of a prompt / requests in the batch.
    """
    seconds: dict[str, dict[str, float]] = {}
    for arm, measured in result("drafters.json")["results"].items():
        by_cell = seconds.setdefault(arm, {})
        for name, found in measured["cells"].items():
            cell = name.rpartition("/")[0]
            by_cell[cell] = by_cell.get(cell, 0.0) + found["rollout_s"]
    off = seconds.pop("off")
    return {
        arm: {cell: took / off[cell] for cell, took in by_cell.items()}
        for arm, by_cell in seconds.items()
    }


def _drafters() -> dict[str, Iterable[Any]]:
    """Return the columns of the drafters' table: a row per drafter."""
    ratios = drafters()
    cells = {
        cell: " / ".join(reversed(cell.split("/")))
        for cell in next(iter(ratios.values()))
    }
    return {
        "requests / tokens of a prompt": [
            f"`{arm.partition(':')[0]}`" for arm in ratios
        ],
        **{
            title: [f"{of[cell]:.2f}" for of in ratios.values()]
            for cell, title in cells.items()
        },
    }


def _agreement() -> dict[str, Iterable[Any]]:
    """Return the columns of the table of how far texts agree: a row per temperature and
    learning rate.
    """
    rows = result("agreement.json")["rows"]
    return {
        "temperature": [f"{row['temperature']:g}" for row in rows],
        "entropy, nats": [f"{row['entropy']:.2f}" for row in rows],
        "learning rate": [f"{row['rate']:.0e}".replace("e-0", "e-") for row in rows],
        "a token is the same": [f"{row['agreement']:.4f}" for row in rows],
        "whole text the same": [f"{row['whole']:.0%}" for row in rows],
        **{
            title: [f"{row[kind]:.2f}" for row in rows]
            for kind, title in (
                ("siblings", "siblings"),
                ("other_noise", "+ other noise"),
                ("own_noise", "+ own noise"),
            )
        },
    }


def _ahead() -> dict[str, Iterable[Any]]:
    """Return the columns of the table of simulated run-ahead: a row per spread of drawn
    lengths, or per recording.
    """
    content = result("simulator_ahead.json")
    names = {
        "rl_reasoning_gym_qwen25_3b_k3": "reasoning gym, 3B",
        "misguided_attention_k3": "long thoughts, 32B",
    }
    rows = [*content["drawn"], *content["recorded"]]
    first = [row["first"] for row in rows]
    return {
        "first visits": [
            names[row["set"]] if "set" in row else f"drawn, spread {row['spread']:g}"
            for row in rows
        ],
        "H100": [row["gpus"] for row in rows],
        "agreement": [row.get("agreement", 0.99) for row in rows],
        "idle": [f"{of['idle']:.0%}" for of in first],
        "history, of off": [f"{of['history_of_off']:.2f}" for of in first],
        "run-ahead, of off": [f"{of['ahead_of_off']:.2f}" for of in first],
        "of history": [f"{of['ahead_of_history']:.2f}" for of in first],
    }


def _routing() -> dict[str, Iterable[Any]]:
    """Return the columns of the table of simulated placements: a row per recording,
    number of GPUs and waves.
    """
    names = {
        "code_humaneval_codegen16b_k100": "code",
        "tot_gpt4_game24_cot_k100": "game of 24",
    }
    names["rl_reasoning_gym_qwen25_3b_k3"] = "reasoning-gym, 3 samples"
    drawings: dict[tuple[str, int, int], list[Any]] = {}
    for row in result("simulator_routing.json")["rows"]:
        drawings.setdefault((names[row["set"]], row["gpus"], row["waves"]), []).append(
            row
        )

    def mean(of: list[Any], placement: str, name: str) -> float:
        return sum(row[placement][name] for row in of) / len(of)

    placements = ("scattered", "longest first")
    rows = drawings.values()
    took = [[mean(of, arm, "rollout_s") for arm in placements] for of in rows]
    tokens = [
        [mean(of, arm, "tokens_per_forward") for arm in placements] for of in rows
    ]
    return {
        **dict(
            zip(("rollouts", "GPUs", "waves"), zip(*drawings, strict=True), strict=True)
        ),
        "longest first": [f"{ours / scattered:.2f}" for scattered, ours in took],
        "tokens per forward: scattered, longest first": [
            f"{a:.2f}, {b:.2f}" for a, b in tokens
        ],
    }


def _varied() -> dict[str, Iterable[Any]]:
    """Return the columns of the table of what changes the answer: a row for each thing
    that is varied.
    """
    found = result("simulator_varied.json")["drawn"]
    names = {"epochs": "epochs, one step each", "lag": "lag, steps"}
    return {
        "what": [names.get(what, what) for what in found],
        "values": [", ".join(of) for of in found.values()],
        "of off": [
            ", ".join(f"{row['rollout_of_off']:.2f}" for row in of.values())
            for of in found.values()
        ],
    }


def _lengths() -> dict[str, Iterable[Any]]:
    """Return the columns of the table of draft lengths: a row per batch."""
    columns: dict[str, list[Any]] = {}
    for budget, rows in result("v2_lengths.json")["time_of_off"].items():
        columns["requests"] = sorted({row["requests"] for row in rows})
        for row in rows:
            took = columns.setdefault(
                f"{row['policy'].rpartition('-')[2]}, `{budget}`", []
            )
            took.append(f"{row['one']:.3f} / {row['own']:.3f}")
    for row in rows:
        columns.setdefault(f"{row['policy'].rpartition('-')[2]}, oracle", []).append(
            f"{row['oracle']:.3f}"
        )
    return columns


ABLATED = {
    "grid": "modelled workloads",
    "models": "a model drafts",
    "traces": "recorded rollouts",
}
"""Parts of the ablation that have the same mechanisms."""


def _ablation() -> dict[str, Iterable[Any]]:
    """Return the columns of the ablation's table: a row per mechanism, with what it is
    worth over the cells of each part.
    """
    content = result("ablation.json")
    arms = [arm for arm in content["arms"] if arm != "as it is"]
    columns = {"switched off": [content["arms"][arm] for arm in arms]}
    for part, title in ABLATED.items():
        worth = content["worth"][part]
        columns[title] = [
            _worth_over_cells(worth[arm]) if arm in worth else "-" for arm in arms
        ]
    return columns


def _worth_over_cells(worth: dict[str, float]) -> str:
    least, median, greatest = (
        f"{100 * worth[name]:+.1f}" for name in ("least", "median", "greatest")
    )
    return f"{least} to {greatest} ({median})"


def _ablation_cells() -> dict[str, Iterable[Any]]:
    """Return the columns of the table of the cells in which a mechanism is worth most,
    or least: a row per cell.
    """
    content = result("ablation.json")
    found = []
    for part in ABLATED:
        for row in content[part]:
            for arm, worth in row["worth"].items():
                if abs(worth) >= 0.02:
                    found.append((arm, part, row, worth))
    order = list(content["arms"])
    found.sort(key=lambda one: (order.index(one[0]), -one[3]))
    return {
        "switched off": [arm for arm, *_ in found],
        "cell": [_cell_name(part, row) for _, part, row, _ in found],
        "as it is, of off": [
            f"{row['of_off']['as it is']:.2f}" for *_, row, _ in found
        ],
        "worth, %": [f"{100 * worth:+.1f}" for *_, worth in found],
        "by seed": [
            f"{100 * row['least_worth'][arm]:+.1f} to"
            f" {100 * row['most_worth'][arm]:+.1f}"
            for arm, _, row, _ in found
        ],
    }


def _cell_name(part: str, row: dict[str, Any]) -> str:
    if part != "grid":
        return f"{ABLATED[part]}: {row['cell'].replace('_', ' ')}"
    slots = f" in {row['slots']}" if row["slots"] else ""
    others = {"scatter": "even", "prior": "right", "drafts": "pay"}
    differs = [
        f"{name} {row[name]}" for name, usual in others.items() if row[name] != usual
    ]
    if not row.get("syncs", True):
        differs.append("no weight syncs")
    return ", ".join([f"{row['steps']} {row['requests']}{slots}", *differs])


def _ablation_others() -> dict[str, Iterable[Any]]:
    """Return the columns of the table of thinning, routing and run-ahead: a row per
    alternative.
    """
    content = result("ablation.json")
    rows = [
        (part.replace("_", " "), arm, worth)
        for part in ("retention", "routing", "run_ahead")
        for arm, worth in content["worth"][part].items()
    ]
    firsts = {
        "retention": "thinned out",
        "routing": "longest first",
        "run ahead": "off",
    }
    return {
        "instead of": [firsts[part] for part, *_ in rows],
        "": [arm for _, arm, _ in rows],
        "time, %": [_worth_over_cells(worth) for *_, worth in rows],
        "cells": [worth["cells"] for *_, worth in rows],
    }


def _results() -> dict[str, Iterable[Any]]:
    """Return the columns of the table of results: a row for each, with the revision
    whose code it measured.
    """
    made = {
        file.name: origin(result(file.name))
        for file in sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    }
    return {
        "result": [f"`{name}`" for name in made],
        "revision": [of.get("revision") or "not recorded" for of in made.values()],
        "processor": [processor(of) for of in made.values()],
    }


def processor(provenance: dict[str, Any]) -> str:
    """Return the short name of the processor on which a result was measured."""
    cpu = str(provenance.get("hardware", {}).get("cpu", "not recorded"))
    return cpu.removesuffix(" Processor").replace("(R)", "")


TABLES = {
    "ablation": _ablation,
    "ablation_cells": _ablation_cells,
    "ablation_others": _ablation_others,
    "agreement": _agreement,
    "ahead": _ahead,
    "demo": _demo,
    "drafters": _drafters,
    "lengths": _lengths,
    "results": _results,
    "routing": _routing,
    "trainings": _trainings,
    "varied": _varied,
}


def _rows(columns: dict[str, Iterable[Any]]) -> str:
    rows = [list(columns), ["---"] * len(columns), *zip(*columns.values(), strict=True)]
    return (
        "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)
        .replace("| --- ", "|---")
        .replace("--- |", "---|")
    )


def _made(mark: re.Match[str]) -> str:
    """Return a mark with the processor, or the version of a package, of its result."""
    begin, file, name, end = mark.groups()
    names = TRAININGS if file == "trainings" else [file]
    found = []
    for made in map(origin, map(result, names)):
        if name == "processor":
            found.append(processor(made))
        else:
            found.append(made["versions"][name].removesuffix("+cpu"))
    return begin + " or ".join(dict.fromkeys(found)) + end


def _figure(mark: re.Match[str]) -> str:
    begin, file, extremes, path, divisor, form, end = mark.groups()
    content = result(file)
    numbers = values(content, path)
    if divisor:
        numbers = [
            a / b for a, b in zip(numbers, values(content, divisor), strict=True)
        ]
    kind, unit = re.fullmatch(r"(\.\d[f%])(M|min|x|less|more)?", form).groups(
        default=""
    )  # type: ignore[union-attr]
    of, suffix = SHOWN[unit]
    numbers = list(map(of, numbers))
    if extremes:
        numbers = [min(numbers), max(numbers)]
    texts = [f"{number:{kind}}{suffix}" for number in numbers]
    return begin + (" to " if extremes else " / ").join(texts) + end
