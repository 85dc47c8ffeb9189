"""Hold the simulator against every published figure: `benchmarks/published/*.yaml`, one file a figure.

    python benchmarks/published.py [--only NAME ...] [--sweeps DIR] --out benchmarks/results/published.json

Each file lists the simulation's inputs, each marked `given` (the paper or its repository says it), `derived` (follows
from what is given), `assumed` (nobody says it; its band is simulated too) or `fitted`. A case is *reproduced* if it
is within the tolerance and nothing was fitted to a checked figure, *consistent* if one constant of the paper was
fitted to another row, of this figure or of the one that `figure` names, and *revised* if the file says what of the
simulation was changed after a first comparison (`revised`), which the published values have decided in this way.
`find` settles an input by the baseline's published seconds, which no case checks. Where a value is that of the best of
several files (`best_of`), only the best is held against it.

DIR holds EfficientRollout's sweeps (`sd_toggle/configs/*.csv` of its public repository), which are not part of this
one. Results of files that are not named stay, each with the provenance of its own run, and are graded anew. Writes
Markdown beside the JSON.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from provenance import provenance, save

from das_adapter.sim.config import parse
from das_adapter.sim.pipeline import Run
from das_adapter.sim.simulate import Simulation

HERE = Path(__file__).parent
GRADES = ("reproduced", "consistent", "revised", "not")
MARKS = ("given", "derived", "assumed", "fitted")
OTHER = "other_of_base"
"""What a step takes beside its rollout, of the base's rollout: of a case, or, where that says `true`, of the inputs."""
NO_BAND = "not simulated"
"""Said of an assumed input whose band would take too long."""


def put(content: dict[str, Any], key: str, value: Any) -> None:
    """Set a key such as `hardware.gpus`."""
    block, *path = content, *key.split(".")
    for part in path[:-1]:
        block = block.setdefault(part, {})
    block[path[-1]] = value


class Figure:
    """A published figure and the simulation of it."""

    def __init__(self, path: Path, sweeps: Path | None) -> None:
        self.name, self.content = path.stem, yaml.safe_load(path.read_text())
        self.inputs = {one["key"]: one for one in self.content["inputs"]}
        for one in self.inputs.values():
            assert one["mark"] in MARKS and one["source"], f"{path}: {one}"
            assert one["mark"] != "assumed" or "band" in one, f"{path}: {one['key']} is assumed and has no band"
            if one["key"] == "steps.file":
                one["value"] = str((sweeps or Path("missing")) / one["value"])
        self._runs: dict[str, Run] = {}

    def run(self, settings: dict[str, Any], arm: str) -> Run:
        """Simulate one arm under some values of inputs."""
        content: dict[str, Any] = {"arms": copy.deepcopy(self.content["arms"])}
        for key, value in settings.items():
            if key != OTHER:
                put(content, key, value)
        content["arms"] = {"arm": content["arms"][arm]}
        key = json.dumps(content, sort_keys=True)
        if key not in self._runs:
            self._runs[key] = Simulation(parse(content, self.name)).run("arm")
        return self._runs[key]

    def seconds(
        self, settings: dict[str, Any], arm: str, case: Mapping[str, Any] = MappingProxyType({}), name: str = ""
    ) -> float:
        """Return the mean rollout time of the steps that count (`name`: another of their times): `count` of them after
        the first `skip`. With a lag the first fill the pipeline and the last drain it."""
        skip, count = (case.get(key, self.content.get(key)) for key in ("skip", "count"))
        steps = self.run(settings, arm).steps[skip or 0 :][:count]
        name = name or ("step_s" if self.content.get("whole") else "rollout_s")
        return sum(getattr(s, name) for s in steps) / len(steps)

    def value(self, case: dict[str, Any], settings: dict[str, Any]) -> float:
        """Return a case's quantity: how many times faster the arm is than the base, rollout or step."""
        settings = {**settings, **case.get("set", {})}
        base, ours = (self.seconds(settings, case.get(name, name), case) for name in ("base", "arm"))
        share = case.get(OTHER, 0.0)
        other = (settings[OTHER] if share is True else share) * base
        if case.get("quantity") == "exposed":  # seconds in which the trainer waits, of the base's
            base, ours = (self.seconds(settings, case.get(name, name), case, "exposed_s") for name in ("base", "arm"))
            return ours / base
        ratio = (base + other) / (ours + other)
        return 1.0 / ratio - 1.0 if case.get("quantity") == "change" else ratio

    def settled(self, changed: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs, some of them changed, with those that are derived or fitted found again."""
        settings = {key: one["value"] for key, one in self.inputs.items()} | changed
        for key, one in self.inputs.items():
            find = one.get("find")
            if find is None or key in changed:
                continue
            low, high = find["between"]
            for _ in range(find.get("halvings", 9)):
                middle = (low * high) ** 0.5
                trial = {**settings, key: middle}
                if "seconds" in find:
                    above = self.seconds(trial, "base") > find["seconds"]
                else:
                    case = next(c for c in self.content["cases"] if c["name"] == find["case"])
                    above = self.value(case, trial) < case["published"]
                low, high = (low, middle) if above else (middle, high)
            settings[key] = (low * high) ** 0.5
        return settings

    def check(self) -> dict[str, Any]:
        """Simulate all cases, at the inputs' values and at the ends of their bands."""
        middle = self.settled({})
        edges = [
            self.settled({key: value})
            for key, one in self.inputs.items()
            if "band" in one and one["band"] != NO_BAND
            for value in one["band"]
        ]
        cases = []
        for case in self.content["cases"]:
            found, others = self.value(case, middle), [self.value(case, edge) for edge in edges]
            cases.append(
                {"name": case["name"], "simulated": found, "band": [min([found, *others]), max([found, *others])]}
            )
            print(self.name, case["published"], cases[-1], flush=True)
        inputs = [one | {"value": _plain(middle[one["key"]])} for one in self.inputs.values()]
        return {"inputs": list(map(simulated, inputs)), "cases": cases}

    def graded(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return what `check` found, held against the published values."""
        tolerance = self.content.get("tolerance", 0.1)
        fitted = any(one["mark"] == "fitted" for one in self.inputs.values())
        best = "revised" if self.content.get("revised") else "consistent" if fitted else "reproduced"
        rows = []
        for case, row in zip(self.content["cases"], result["cases"], strict=False):  # new ones come last
            found, (low, high), said = row["simulated"], row["band"], case["published"]
            change, share = (case.get("quantity") == kind for kind in ("change", "exposed"))
            row = {
                "name": case["name"],
                "published": said,
                "simulated": found,
                "band": [low, high],
                "sign_open": low < (0.0 if change else 1.0) < high,
            }
            if said is None:  # shown beside the others
                rows.append(row | {"error": None, "grade": "no value"})
                continue
            own = any(one.get("find", {}).get("case") == case["name"] for one in self.inputs.values())
            ratio = (1 + found) / (1 + said) if change else found / said
            error = found - said if share else ratio - 1.0
            right = abs(error) <= tolerance and (not change or (found < 0) == (said < 0))
            rows.append(row | {"error": error, "grade": "fitted to" if own else (best if right else "not")})
        about = {key: self.content.get(key) for key in ("title", "source", "decides", "revised", "best_of")}
        then = {one["key"]: one for one in result["inputs"]}
        now = {key: simulated(one) for key, one in self.inputs.items()}
        changed = [
            key for key, one in now.items() if "find" not in self.inputs[key] and one != simulated(then.get(key, {}))
        ]
        said = [{name: one[name] for name in ("mark", "source")} for one in self.inputs.values()]
        return {
            **result,
            **about,
            "inputs": [then.get(key, now[key]) | said for key, said in zip(now, said, strict=True)],
            "tolerance": tolerance,
            "cases": rows,
            "pairs_in_order": self.in_order(rows),
            "changed_inputs": changed,
        }

    def in_order(self, rows: list[dict[str, Any]]) -> list[int]:
        """Return of how many pairs of cases the simulation has the published order, and how many pairs there are: cases
        of one kind, with the same base, whose published values differ by more than 3 %, and none that was fitted to."""
        right = of = 0
        for (case, a), (other, b) in itertools.permutations(zip(self.content["cases"], rows, strict=False), 2):
            if {a["grade"], b["grade"]} & {"no value", "fitted to"} or a["simulated"] == b["simulated"]:
                continue  # the same arm of two figures is one
            kinds = [[c.get(key) for key in ("base", "quantity", "other_of_base")] for c in (case, other)]
            change = float(case.get("quantity") == "change")
            if kinds[0] == kinds[1] and change + a["published"] < 0.97 * (change + b["published"]):
                right, of = right + (a["simulated"] < b["simulated"]), of + 1
        return [right, of]


def simulated(one: dict[str, Any]) -> dict[str, Any]:
    """Return what the simulation knows of an input; the rest is said in the figure's file."""
    return {name: _plain(value) for name, value in one.items() if name in ("key", "value", "band")}


def write(path: Path, result: dict[str, Any]) -> None:
    """Write the results without what the figures' files say of their inputs."""
    figures = {name: one | {"inputs": list(map(simulated, one["inputs"]))} for name, one in result["figures"].items()}
    save(path, result | {"figures": figures})


def _plain(value: Any) -> Any:
    return Path(value).name if isinstance(value, str) and "/" in value and value.endswith(".csv") else value


def keep_the_best(figures: dict[str, Any]) -> None:
    """Of files with one value between them, hold only the one that simulates the largest saving against it."""
    names = {figure["best_of"] for figure in figures.values() if figure.get("best_of")}
    for name in names:
        of = [f for f in figures.values() if f.get("best_of") == name]
        cases = [case for figure in of for case in figure["cases"] if case["error"] is not None]
        for case in sorted(cases, key=lambda case: case["simulated"])[1:]:
            case.update(published=None, error=None, grade="no value")


def markdown(result: dict[str, Any]) -> str:
    """Return the figures as a page."""
    figures = result["figures"]
    grades = [case["grade"] for figure in figures.values() for case in figure["cases"] if case["error"] is not None]
    counted = ", ".join(f"{grades.count(grade)} are *{grade}*" for grade in sorted(set(grades)))
    lines = [
        "# Published results, simulated",
        "",
        "`python benchmarks/published.py --sweeps DIR --out benchmarks/results/published.json`.",
        f"Of {len(grades)} published values {counted}.",
        "",
        "*reproduced*: within the tolerance, nothing fitted to a checked figure. *consistent*: within it, with one",
        "constant of the paper fitted to another of its rows (*fitted to*). *revised*: within it, after the simulation",
        "was changed because a first comparison had failed; what was changed stands with the figure, and no input was",
        "fitted, but the published values have had their say. *not*: outside. The tolerance is on the ratio of times,",
        "for exposed generation on the share. The band is that of the assumed inputs, each moved by itself to the ends",
        "of its range, with what is derived or fitted found again; *sign open*: faster at one end, slower at another.",
        "*order*: pairs of values that differ by more than 3 % and have the published order.",
        "",
        "| figure | cases | reproduced | consistent | revised | not | mean error | largest | order | what decides it |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for figure in figures.values():
        cases = [c for c in figure["cases"] if c["grade"] not in ("fitted to", "no value")]
        errors = [abs(c["error"]) for c in cases] or [0.0]
        counts = " | ".join(str(sum(c["grade"] == g for c in cases)) for g in GRADES)
        mean, largest = f"{sum(errors) / len(errors):.0%}", f"{max(errors):.0%}"
        right, of = figure["pairs_in_order"]
        order = f"{right} of {of}" if of else ""
        lines.append(
            f"| {figure['title']} | {len(cases)} | {counts} | {mean} | {largest} | {order} | {figure['decides']} |"
        )
    for figure in figures.values():
        lines += ["", f"## {figure['title']}", "", f"{figure['source']}; tolerance {figure['tolerance']:.0%}.", ""]
        if figure.get("revised"):
            lines += [f"Revised: {figure['revised']}.", ""]
        if changed := ", ".join(f"`{key}`" for key in figure["changed_inputs"]):
            lines += [f"Simulated before {changed} was as the file has it now: the next run changes these figures.", ""]
        lines += ["| case | published | simulated | band | error | grade |", "|---|---|---|---|---|---|"]
        for c in figure["cases"]:
            band = f"{c['band'][0]:.2f} to {c['band'][1]:.2f}{', sign open' * c.get('sign_open', False)}"
            said, error = ("", "") if c["error"] is None else (c["published"], f"{c['error']:+.0%}")
            lines.append(f"| {c['name']} | {said} | {c['simulated']:.2f} | {band} | {error} | {c['grade']} |")
        lines += ["", "| input | value | mark | source | band |", "|---|---|---|---|---|"]
        for one in figure["inputs"]:
            value = f"{one['value']:.4g}" if isinstance(one["value"], float) else one["value"]
            band = one.get("band", "")
            band = band if isinstance(band, str) else " to ".join(map(str, band))
            lines.append(f"| `{one['key']}` | {value} | {one['mark']} | {one['source']} | {band} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="files of benchmarks/published, without .yaml; none: grade anew")
    parser.add_argument("--sweeps", type=Path, help="EfficientRollout's sd_toggle/configs")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    result = json.loads(args.out.read_text()) if args.out.exists() else {"figures": {}}
    for path in sorted((HERE / "published").glob("*.yaml")):
        figure = Figure(path, args.sweeps)
        if args.only is not None and path.stem not in args.only:
            if path.stem in result["figures"]:
                result["figures"][path.stem] = figure.graded(result["figures"][path.stem])
            continue
        file = figure.inputs.get("steps.file")
        if file is not None and not Path(file["value"]).exists():
            print(f"{path.stem}: left out: needs {file['value']}")
            continue
        begun = {"provenance": provenance()}  # of the code that is loaded, whatever is checked out meanwhile
        result["figures"][path.stem] = figure.graded(figure.check()) | begun
        result["figures"] = dict(sorted(result["figures"].items()))
        write(args.out, result)
    keep_the_best(result["figures"])
    write(args.out, result)
    args.out.with_suffix(".md").write_text(markdown(result))


if __name__ == "__main__":
    main()
