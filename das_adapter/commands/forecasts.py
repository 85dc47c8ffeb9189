"""Commands that say, without a training run, what drafts would save: estimate,
simulate, bench.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from das_adapter.commands.output import (
    EXISTING,
    FILE,
    as_json,
    bar,
    print_json,
    print_table,
)


@click.command()
@click.argument("path", type=EXISTING, metavar="DUMP")
@click.option(
    "--tokenizer",
    help="Name or folder of the policy's tokenizer, where DUMP holds text.",
)
@click.option("--hardware", "gpu", required=True, help="The GPU, such as H100.")
@click.option(
    "--model",
    required=True,
    help="The policy, a name such as Qwen/Qwen2.5-7B or a config.json.",
)
@click.option(
    "--gpus",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="GPUs that generate.",
)
@click.option(
    "--per-engine",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="GPUs of an engine.",
)
@click.option(
    "--precision",
    type=click.Choice(["bf16", "fp8"]),
    default="bf16",
    show_default=True,
    help="Of weights.",
)
@click.option(
    "--max-num-seqs",
    type=click.IntRange(1),
    show_default="256",
    help="Most requests of an engine.",
)
@click.option(
    "--other-s",
    type=click.FloatRange(0),
    default=0.0,
    help="Seconds of a step beside its rollout.",
)
@click.option(
    "--agreement",
    type=click.FloatRange(0, 1, max_open=True),
    help=(
        "Also with run-ahead: the chance that a token written ahead is the same under"
        " the weights of its step."
    ),
)
@as_json
def estimate(
    path: Path,
    tokenizer: str | None,
    max_num_seqs: int | None,
    other_s: float,
    agreement: float | None,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Estimate what dumped rollouts would take on a cluster.

    Without drafts and with them; and which block to begin with. DUMP, a file or a
    directory: veRL's trainer.rollout_data_dir, NeMo-RL's train_data_step*.jsonl, or
    .npz / .jsonl of responses.
    """
    import yaml

    from das_adapter.sim import pays, rollouts

    settings: dict[str, Any] = {
        name: chosen.pop(name) for name in ("model", "precision")
    }
    settings |= {"hardware": chosen, "pipeline": {"train_s": other_s}}
    settings |= {"engine": {"max_num_seqs": max_num_seqs}} if max_num_seqs else {}
    with bar(2 if agreement is None else 3) as progress:
        answer = pays.would_it_pay(
            rollouts.read(path, tokenizer), settings, agreement, progress
        )
    if as_json:
        print_json(answer)
        return
    _print_arms("epoch", answer["epochs"].items())
    drafted = {arm: f for arm, f in answer["arms"].items() if arm != "off"}
    engines = (
        f"{answer['engines']} engines, {answer['kv_tokens']} tokens of KV cache each"
    )
    click.echo(
        f"{engines}, with nothing left for {answer['idle']:.0%} of the rollouts without"
        " drafts"
    )
    click.echo(
        ", ".join(
            f"{arm}: {f['rollout_of_first']:.2f} of off" for arm, f in drafted.items()
        )
    )
    if len(answer["epochs"]) == 1:
        click.echo(
            "Note: no problem comes back in the dump: a later epoch would be drafted"
            " for better."
        )
    click.echo(
        "Recommended:\n"
        + yaml.safe_dump({"das": answer["das"]}, sort_keys=False).rstrip()
    )


@click.command()
@click.argument("path", type=FILE, metavar="CONFIG")
@click.option(
    "--vary", multiple=True, metavar="KEY=V1,V2", help="Simulate every combination."
)
@as_json
def simulate(path: Path, vary: tuple[str, ...], as_json: bool) -> None:
    """Simulate rollouts on given hardware: seconds by drafter.

    CONFIG: a YAML file that describes them.
    """
    from das_adapter.sim import config as configs
    from das_adapter.sim import simulate as run

    config = configs.read(path)
    varied = list(configs.variants(config, _varied(vary)))
    with bar(len(varied) * len(config.arms)) as progress:
        figures = [
            {"values": values, "arms": run(variant, progress=progress)}
            for values, variant in varied
        ]
    if as_json:
        print_json(figures if vary else figures[0]["arms"])
    else:
        named = (
            (
                ", ".join(f"{key}={value}" for key, value in f["values"].items()),
                f["arms"],
            )
            for f in figures
        )
        _print_arms("varied" if vary else "", named)


def _varied(options: tuple[str, ...]) -> dict[str, list[Any]]:
    import yaml

    found = {}
    for option in options:
        key, _, values = option.partition("=")
        try:
            found[key] = yaml.safe_load(f"[{values}]")
        except yaml.YAMLError:
            found[key] = []
        if not found[key]:
            expected = "KEY=V1,V2, values as in YAML, such as hardware.gpus=8,64"
            raise click.BadParameter(
                f"found {option!r}, expected {expected}", param_hint="--vary"
            )
    return found


def _print_arms(of: str, groups: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Print the figures of arms, by what each group of them is of."""
    row = (
        "{rollout_s:.2f} {rollout_of_first:.2f} {step_s:.2f} {step_of_first:.2f}"
        " {tokens_per_forward:.2f}"
    )
    rows = (
        (name, arm, *row.format(**f).split())
        for name, arms in groups
        for arm, f in arms.items()
    )
    print_table(
        (of, "arm", "rollout s", "ratio", "step s", "ratio", "tok/fwd"),
        rows,
        left=2,
        overflow="fold",
    )


@click.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[PART]...")
def bench(arguments: tuple[str, ...]) -> None:
    """Measure das-adapter on a GPU, without weights or a network; `--help` lists the
    parts.
    """
    from das_adapter.bench.run import main as run

    run(arguments)


COMMANDS = (estimate, simulate, bench)
