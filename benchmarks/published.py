"""Hold the simulator against published figures: `benchmarks/published/*.yaml`, one file
for figures with common inputs.

    python benchmarks/published.py [--only NAME ...] \
        --out benchmarks/results/published.json

Each file lists the simulation's inputs, each marked `given` (read in the paper or its
repository), `derived` (follows from what is given), `assumed` (nobody says it; its band
is simulated too) or `fitted`: found by bisection so that one published value comes out
(`find.case`), here or in another file (`find.file`).

A case is one published value. It is *fitted to*, or *seen*: the simulation was changed
after it had been compared with this value (`revised` says how), so that the value has
had its say. Neither is graded. Every other one is predicted, and graded *within* or
*outside*. One prediction of each paper is its held-out check (`held_out` says why this
one).

Results of files that are not named stay, each with the provenance of its own run.
Writes Markdown beside the JSON.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from provenance import provenance, save

from das_adapter.sim.config import SimConfig, parse
from das_adapter.sim.pipeline import Run
from das_adapter.sim.simulate import Simulation, step_times

HERE = Path(__file__).parent
MARKS = ("given", "derived", "assumed", "fitted")
TOLERANCE = 0.1
"""Greatest relative error of a prediction that counts as right, of every time and every
ratio of times. It is what the simulator reaches on a real engine whose step times are
measured (`results/simulator.json`: nine of ten arms), and less is known of the papers'
engines.
"""
OF_EFFECT = 0.5
"""Greatest error of a share of time saved, of the published share: that nothing is
saved, or twice as much, is never right, however small the effect.
"""
NO_BAND = "not simulated"
"""Said of an assumed input whose band would take too long."""


def put(content: dict[str, Any], key: str, value: Any) -> None:
    """Set a key such as `hardware.gpus`."""
    block, *path = content, *key.split(".")
    for part in path[:-1]:
        block = block.setdefault(part, {})
    block[path[-1]] = value


class Figure:
    """Published values with common inputs, and the simulation of them."""

    def __init__(self, path: Path, results: dict[str, Any] | None = None) -> None:
        """`results`: of other files, by name, where constants are fitted that this one
        takes.
        """
        self.name = path.stem
        self.content = yaml.safe_load(path.read_text())
        self.paper: str = self.content["paper"]
        self.inputs = {one["key"]: one for one in self.content["inputs"]}
        self.cases = {one["name"]: one for one in self.content["cases"]}
        self._results = {} if results is None else results
        self.borrows = {
            one["find"]["file"]
            for one in self.inputs.values()
            if "file" in one.get("find", {})
        }
        """Files that fit a constant which it takes."""
        self._runs: dict[str, Run] = {}

    def digest(self) -> str:
        """Return what tells whether a result is of these inputs, arms and cases."""
        read = [
            [
                {
                    key: one[key]
                    for key in ("key", "value", "band", "find")
                    if key in one
                }
                for one in self.inputs.values()
            ],
            [
                {key: one[key] for key in one if key not in ("held_out", "seen")}
                for one in self.cases.values()
            ],
            [self.content.get(key) for key in ("arms", "skip", "count", "whole")],
        ]
        return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()[
            :12
        ]

    def config(self, settings: dict[str, Any], arm: str) -> SimConfig:
        """Return the simulation of one arm under some values of inputs."""
        content: dict[str, Any] = {"arms": copy.deepcopy(self.content["arms"])}
        for key, value in settings.items():
            put(content, key, value)
        content["arms"] = {"arm": content["arms"][arm]}
        return parse(content, self.name)

    def seconds(
        self, case: dict[str, Any], settings: dict[str, Any], arm: str, name: str = ""
    ) -> float:
        """Return the mean time of the steps that count (`name`: which of their times):
        `count` of them after the first `skip`. With a lag the first fill the pipeline
        and the last drain it.
        """
        config = self.config(settings, arm)
        key = config.model_dump_json()
        if key not in self._runs:
            self._runs[key] = Simulation(config).run("arm")
        skip, count = (
            case.get(key, self.content.get(key)) for key in ("skip", "count")
        )
        steps = self._runs[key].steps[skip or 0 :][:count]
        name = name or ("step_s" if self.content.get("whole") else "rollout_s")
        return sum(getattr(s, name) for s in steps) / len(steps)

    def value(self, case: dict[str, Any], settings: dict[str, Any]) -> float:
        """Return a case's quantity: by default how many times faster the arm is than
        the base; `change`: of the base's time; `exposed`: the arm's wait of the
        trainer, of the base's; `seconds`: the arm's time; `ms`: of a decode step with
        so many requests, tokens of context and draft tokens of each (`step`).
        """
        settings = {**settings, **case.get("set", {})}
        quantity = case.get("quantity")
        if quantity == "ms":
            requests, context, drafts = (
                np.array([float(value)]) for value in case["step"]
            )
            steps = step_times(self.config(settings, case["arm"]))
            return 1e3 * float(
                steps.decode(requests, requests * (1.0 + drafts), requests * context)[0]
            )
        if quantity == "seconds":
            return self.seconds(case, settings, case["arm"])
        time = "exposed_s" if quantity == "exposed" else ""
        base, ours = (
            self.seconds(case, settings, arm, time)
            for arm in (case.get("base", "base"), case["arm"])
        )
        # what a step takes beside its rollout
        other = case.get("other_of_base", 0.0) * base
        ratio = (ours + other) / (base + other)
        return (
            ratio - 1.0
            if quantity == "change"
            else ratio
            if quantity == "exposed"
            else 1.0 / ratio
        )

    def settled(self, changed: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs, some of them changed, with those that are fitted found
        again.
        """
        finds = {key: one["find"] for key, one in self.inputs.items() if "find" in one}
        others = {
            key: self._results[find["file"]]["fitted"][key]
            for key, find in finds.items()
            if "file" in find
        }
        settings = (
            {key: one.get("value") for key, one in self.inputs.items()}
            | others
            | changed
        )
        for key, find in finds.items():
            if key in others or key in changed:
                continue
            case = self.cases[find["case"]]
            (low, high) = find["between"]
            rises = case.get("quantity") == "seconds"  # with the input; a ratio falls
            for _ in range(find.get("halvings", 9)):
                settings[key] = middle = (low * high) ** 0.5
                above = (self.value(case, settings) > case["published"]) == rises
                low, high = (low, middle) if above else (middle, high)
            settings[key] = (low * high) ** 0.5
        return settings

    def check(self) -> dict[str, Any]:
        """Simulate all cases, at the inputs' values and, but for what was seen, at the
        ends of their bands.
        """
        middle = self.settled({})
        bands = {
            key: one["band"]
            for key, one in self.inputs.items()
            if one.get("band", NO_BAND) != NO_BAND
        }
        edges = [
            self.settled({key: value}) for key, band in bands.items() for value in band
        ]
        cases = {}
        for name, case in self.cases.items():
            found = [
                self.value(case, settings)
                for settings in (middle, *(() if self.seen(case) else edges))
            ]
            cases[name] = {"simulated": found[0], "band": [min(found), max(found)]}
            print(self.name, name, case["published"], cases[name], flush=True)
        fitted = {key: middle[key] for key, one in self.inputs.items() if "find" in one}
        return {
            "of": self.digest(),
            "fitted": fitted,
            "cases": cases,
            "provenance": provenance(),
        }

    def rows(self, result: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the cases with what was simulated of them, their errors and their
        grades.
        """
        own = {one["find"].get("case") for one in self.inputs.values() if "find" in one}
        found = []
        for name, case in self.cases.items():
            row = {**case, **result["cases"][name], "error": None}
            if case["published"] is None:
                grade = "shown"
            else:
                row["error"], right = error(case, row["simulated"])
                grade = (
                    "fitted to"
                    if name in own
                    else "seen"
                    if self.seen(case)
                    else "within"
                    if right
                    else "outside"
                )
            found.append(row | {"grade": grade})
        return found

    def seen(self, case: dict[str, Any]) -> bool:
        """Say whether the simulation was changed after it had been compared with a
        case.
        """
        return bool(case.get("seen", False))


def error(case: dict[str, Any], found: float) -> tuple[float, bool]:
    """Return the relative error of a value, of a ratio of times or of a time, and
    whether it is small enough.
    """
    said = case["published"]
    quantity = case.get("quantity")
    change = float(quantity == "change")
    off = (change + found) / (change + said) - 1.0
    right = abs(off) <= TOLERANCE
    if quantity in (None, "change"):
        saved, truly = (
            -value if change else 1.0 - 1.0 / value for value in (found, said)
        )
        right = right and abs(saved - truly) <= OF_EFFECT * abs(truly)
    return off, right


def papers(figures: list[Figure], results: dict[str, Any]) -> dict[str, Any]:
    """Return what each paper's predictions came to, and its held-out check."""
    found: dict[str, Any] = {}
    for figure in figures:
        if figure.name not in results:
            continue
        one = found.setdefault(
            figure.paper, {"predicted": 0, "within": 0, "fitted_to": 0, "seen": 0}
        )
        for row in figure.rows(results[figure.name]):
            if row["grade"] in ("within", "outside"):
                one["predicted"] += 1
                one["within"] += row["grade"] == "within"
            elif row["grade"] != "shown":
                one[row["grade"].replace(" ", "_")] += 1
            if "held_out" in row:
                one["held_out"] = {
                    key: row[key]
                    for key in ("name", "published", "simulated", "error", "grade")
                }
    return found


def markdown(figures: list[Figure], results: dict[str, Any]) -> str:
    """Return the figures as a page, by paper."""
    lines = [
        "# Published results, simulated",
        "",
        "`python benchmarks/published.py --out benchmarks/results/published.json`.",
        "",
        (
            "*Given* is what was read in the paper or its repository, *derived* what"
            " follows from it, *assumed* what"
        ),
        (
            "nobody says, *fitted* a constant that was found by bisection so that one"
            " published value comes out. That"
        ),
        (
            "value, *fitted to*, is not graded; nor is what was *seen*: the simulation"
            " was changed after it had been"
        ),
        (
            "compared with it. All others are predictions. *Within*: at most "
            f"{TOLERANCE:.0%} off, as a time or a ratio of times, and"
        ),
        (
            f"in the share of time saved by at most {OF_EFFECT:.0%} of the published"
            " share; these bounds are the same for"
        ),
        (
            "all (`benchmarks/published.py` says why). The band is that of the assumed"
            " inputs, each moved by itself to"
        ),
        "the ends of its range, with what is fitted found again.",
        "",
        (
            "| paper | fitted, to what | predictions within | held-out check | fitted"
            " to | seen |"
        ),
        "|---|---|---|---|---|---|",
    ]
    for paper, one in papers(figures, results).items():
        of_paper = [figure for figure in figures if figure.paper == paper]
        constants = [
            f"`{key}` to {to}" for figure in of_paper for key, to in _fitted(figure)
        ]
        held = one.get("held_out")  # of a file that was not simulated yet
        check = (
            held
            and f"{held['name']}: {held['published']:g}, simulated"
            f" {held['simulated']:.2f}: {held['grade']}"
        )
        counts = (
            f"{one['within']} of {one['predicted']} | {check} | {one['fitted_to']} |"
            f" {one['seen']}"
        )
        lines.append(f"| {paper} | {'; '.join(constants)} | {counts} |")
    for figure in figures:
        if figure.name in results:
            lines += _page(figure, results[figure.name])
        else:
            lines += [
                "",
                f"## {figure.content['title']}",
                "",
                "Not simulated since its inputs were changed.",
            ]
    return "\n".join(lines) + "\n"


def _fitted(figure: Figure) -> list[tuple[str, str]]:
    """Return the constants that a file fits, and to what; also those of the package
    (`fitted` of the file).
    """
    own = [
        (key, one["find"]["case"])
        for key, one in figure.inputs.items()
        if "case" in one.get("find", {})
    ]
    return own + list(figure.content.get("fitted", {}).items())


def _page(figure: Figure, result: dict[str, Any]) -> list[str]:
    content = figure.content
    lines = [
        "",
        f"## {content['title']}",
        "",
        f"{content['source']}. What decides: {content['decides']}.",
        "",
    ]
    if "revised" in content:
        lines += [f"Seen: {content['revised']}.", ""]
    lines += [
        "| case | published | simulated | band | error | grade |",
        "|---|---|---|---|---|---|",
    ]
    for row in figure.rows(result):
        band = "" if row["grade"] == "seen" else "{:.2f} to {:.2f}".format(*row["band"])
        said, off = (
            ("", "")
            if row["error"] is None
            else (f"{row['published']:g}", f"{row['error']:+.0%}")
        )
        grade = (
            f"{row['grade']}; held out: {row['held_out']}"
            if "held_out" in row
            else row["grade"]
        )
        lines.append(
            f"| {row['name']} | {said} | {row['simulated']:.2f} | {band} | {off} |"
            f" {grade} |"
        )
    lines += ["", "| input | value | mark | source | band |", "|---|---|---|---|---|"]
    for key, one in figure.inputs.items():
        value = result["fitted"].get(key, one.get("value"))
        band = one.get("band", "")
        text = f"{value:.4g}" if isinstance(value, float) else value
        band = band if isinstance(band, str) else " to ".join(map(str, band))
        lines.append(f"| `{key}` | {text} | {one['mark']} | {one['source']} | {band} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="*",
        help="files of benchmarks/published, without .yaml; none: only grade",
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    results: dict[str, Any] = (
        json.loads(args.out.read_text()) if args.out.exists() else {}
    )
    figures = [
        Figure(path, results) for path in sorted((HERE / "published").glob("*.yaml"))
    ]
    by_name = {figure.name: figure for figure in figures}
    for name in TopologicalSorter(
        {figure.name: figure.borrows for figure in figures}
    ).static_order():
        if args.only is None or name in args.only:
            results[name] = by_name[name].check()
            save(args.out, results)
    kept = {
        figure.name: results[figure.name]
        for figure in figures
        if figure.name in results
    }
    save(args.out, {"papers": papers(figures, results), **kept})
    args.out.with_suffix(".md").write_text(markdown(figures, results))


if __name__ == "__main__":
    main()
