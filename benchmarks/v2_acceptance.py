"""Accepted draft tokens of vLLM's V2 model runner beside the V1 runner: engines of one
vLLM, the same seeds and tokens.

python benchmarks/v2_acceptance.py --newest .venv/newest --out FILE.json

The tiny policy, whose text is that of the demo's, answers the same problems in several
visits, with a weight sync after each. Needs no GPU: see tests/contract/v2_cpu.py. Times
are not compared: what the controller hears of them is the same on any machine.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from provenance import provenance, save

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "contract"))
import v2_cpu
from jobs import Request, Round, engines
from requested import ALWAYS, prompts

SAMPLES = 4
SLOTS = 16
SMALL = {"drafter": "history", "history": {"device_bytes": "8MiB"}}
SETTINGS: dict[str, dict[str, Any]] = {
    "every draft": {"das": {**SMALL, **ALWAYS}},
    "controller": {"das": SMALL, "sabotage": "slow policy"},
}
"""Without the controller; and with it, where it is told that a step takes the same time
whatever it carries.
"""
RUNNERS = {"V1": {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "V2": v2_cpu.ENV}


def rounds(count: int, visits: int, tokens: int) -> list[Round]:
    """Groups of samples for each of the problems, visit after visit."""
    asked = [
        Request(p, {"temperature": 1.0, "max_tokens": tokens})
        for p in prompts(-(-count // SAMPLES))
    ]

    def labelled(visit: int, i: int) -> Request:
        return asked[i // SAMPLES].labelled(
            das_problem=i // SAMPLES, das_seed=100_000 * visit + i
        )

    return [
        Round([labelled(v, i) for i in range(count)], refresh=v, brief=True)
        for v in range(1, visits + 1)
    ]


def figures(visits: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Return what was counted in each visit. Draft tokens that V1 accepts behind a
    response's end are not accepted here.
    """
    found = []
    for visit in visits:
        tokens = sum(map(len, visit["tokens"]))
        forwards = visit["stats"]["request_forwards"]
        accepted = {
            "accepted_tokens": tokens - forwards,
            "accepted_per_forward": tokens / forwards - 1,
        }
        found.append(
            {
                "tokens": tokens,
                "request_forwards": forwards,
                "draft_tokens": visit["stats"]["draft_tokens"],
            }
            | accepted
        )
    return found


def compare(arms: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Hold the runners against each other, which must have written the same tokens."""
    v1 = arms["V1"]
    v2 = arms["V2"]
    if [v["tokens"] for v in v1] != [v["tokens"] for v in v2]:
        raise click.ClickException("the runners have written different tokens")
    if {name: {v["hello"]["runner"] for v in arm} for name, arm in arms.items()} != {
        "V1": {"V1"},
        "V2": {"V2"},
    }:
        raise click.ClickException("an engine has another runner than it should")
    counted = {name: figures(arm) for name, arm in arms.items()}
    accepted = [
        [v["accepted_per_forward"] for v in counted[name]] for name in ("V1", "V2")
    ]
    total = [
        sum(v["accepted_tokens"] for v in arm) / sum(v["request_forwards"] for v in arm)
        for arm in counted.values()
    ]
    by_visit = [b / a for a, b in zip(*accepted, strict=True)]
    return {**counted, "ratio_by_visit": by_visit, "ratio": total[1] / total[0]}


@click.command()
@click.option(
    "--newest",
    type=click.Path(exists=True, path_type=Path),
    required=True,
    help="Directory of a vLLM.",
)
@click.option(
    "--requests", "count", default=64, show_default=True, help="Requests of a visit."
)
@click.option("--visits", default=3, show_default=True)
@click.option(
    "--tokens", default=200, show_default=True, help="Most tokens of a response."
)
@click.option("--out", type=click.Path(path_type=Path), help="Write the figures here.")
def main(newest: Path, count: int, visits: int, tokens: int, out: Path | None) -> None:
    """Compare accepted draft tokens per forward pass of a request."""
    path = str(newest.resolve())
    build = {"PYTHONPATH": path, "VLLM_CACHE_ROOT": f"{path}/.cache"}
    asked = rounds(count, visits, tokens)
    arms = {}
    for name, environment in RUNNERS.items():
        with (
            tempfile.TemporaryDirectory() as logs,
            engines(build | environment, Path(logs)) as run,
        ):
            settings = SETTINGS.values()
            arms[name] = [
                run(**setting, rounds=asked, engine={"max_num_seqs": SLOTS})
                for setting in settings
            ]
    result = {
        setting: (
            compare({name: of[i] for name, of in arms.items()})
            | {"settings": SETTINGS[setting]}
        )
        for i, setting in enumerate(SETTINGS)
    }
    for setting, found in result.items():
        visit = ", ".join(f"{ratio:.3f}" for ratio in found["ratio_by_visit"])
        click.echo(
            f"{setting}: V2 accepts {found['ratio']:.3f} of V1 per forward pass of a"
            f" request ({visit} by visit)"
        )
    if out:
        made = provenance()
        made["versions"]["vllm"] = next(
            d.version
            for d in importlib.metadata.distributions(path=[path])
            if d.metadata["Name"].startswith("vllm")
        )
        work = {
            "requests": count,
            "visits": visits,
            "tokens": tokens,
            "samples": SAMPLES,
            "slots": SLOTS,
        }
        save(out, {"provenance": made, "work": work, "settings": result})


if __name__ == "__main__":
    main()
