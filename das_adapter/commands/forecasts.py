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
    examples,
    print_json,
    print_table,
)


@click.command(
    epilog=examples(
        "das-adapter estimate rollouts/ --hardware H100 --gpus 8"
        " --model Qwen/Qwen2.5-7B --tokenizer Qwen/Qwen2.5-7B-Instruct",
    )
)
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
    directory: veRL's trainer.rollout_data_dir, NeMo-RL's train_data_step*.jsonl, TRL's
    completions*.parquet (GRPOConfig(log_completions=True)), or rows of prompt and
    response (.jsonl, .json, .csv, .parquet, .npz).
    """
    import yaml

    from das_adapter.sim import pays, rollouts

    settings: dict[str, Any] = {
        "model": chosen.pop("model"),
        "precision": chosen.pop("precision"),
        "hardware": chosen,
        "pipeline": {"train_s": other_s},
    }
    if max_num_seqs is not None:
        settings["engine"] = {"max_num_seqs": max_num_seqs}
    num_arms = 2 if agreement is None else 3
    with bar(num_arms) as progress:
        dump = rollouts.read(path, tokenizer)
        answer = pays.would_it_pay(dump, settings, agreement, progress)
    read = pays.contents(dump)
    doubts = pays.doubts(dump)
    if as_json:
        print_json({"read": read._asdict(), "doubts": doubts, **answer})
        return
    click.echo(
        f"Read rollouts: {read.rollouts:,}; problems: {read.problems:,}; steps:"
        f" {read.steps:,}; tokens: {read.tokens:,}."
    )
    for doubt in doubts:
        click.echo(f"Note: {doubt}.")
    _print_arms("epoch", answer["epochs"].items())
    engines = (
        f"{answer['engines']} engines, {answer['kv_tokens']} tokens of KV cache each"
    )
    click.echo(
        f"{engines}, with nothing left for {answer['idle']:.0%} of the rollouts without"
        " drafts"
    )
    if "state_mib" in answer:
        states = [f"{arm} {mib:.0f}" for arm, mib in answer["state_mib"].items()]
        click.echo(
            f"Recurrent state, MiB a request on each device: {', '.join(states)}"
        )
    ratios = []
    for arm, figures in answer["arms"].items():
        if arm != "off":
            ratios.append(f"{arm}: {figures['rollout_of_first']:.2f} of off")
    click.echo(", ".join(ratios))
    if len(answer["epochs"]) == 1:
        click.echo(
            "Note: no problem comes back in the dump: a later epoch would be drafted"
            " for better."
        )
    block = yaml.safe_dump({"das": answer["das"]}, sort_keys=False)
    click.echo(f"Recommended:\n{block.rstrip()}")


@click.command(
    epilog=examples("das-adapter simulate simulation.yaml --vary hardware.gpus=8,16")
)
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
    variants = list(configs.variants(config, _parse_vary(vary)))
    results = []
    with bar(len(variants) * len(config.arms)) as progress:
        for values, variant in variants:
            arms = run(variant, progress=progress)
            results.append({"values": values, "arms": arms})
    if as_json:
        print_json(results if vary else results[0]["arms"])
        return
    groups = []
    for result in results:
        assignments = [f"{key}={value}" for key, value in result["values"].items()]
        groups.append((", ".join(assignments), result["arms"]))
    _print_arms("varied" if vary else "", groups)


def _parse_vary(options: tuple[str, ...]) -> dict[str, list[Any]]:
    """Return the values of each key of the options `--vary`."""
    import yaml

    values_by_key = {}
    for option in options:
        key, _, values = option.partition("=")
        try:
            values_by_key[key] = yaml.safe_load(f"[{values}]")
        except yaml.YAMLError:
            values_by_key[key] = []
        if not values_by_key[key]:
            expected = "KEY=V1,V2, values as in YAML, such as hardware.gpus=8,64"
            raise click.BadParameter(
                f"found {option!r}, expected {expected}", param_hint="--vary"
            )
    return values_by_key


def _print_arms(heading: str, groups: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Print the figures of arms. `groups`: names, which stand under the heading, each
    with its arms.
    """
    columns = (
        heading,
        "arm",
        "rollout s",
        "rollout ratio",
        "step s",
        "step ratio",
        "tok/fwd",
    )
    shown_figures = (
        "rollout_s",
        "rollout_of_first",
        "step_s",
        "step_of_first",
        "tokens_per_forward",
    )
    rows = []
    for name, arms in groups:
        for arm, figures in arms.items():
            cells = [f"{figures[figure]:.2f}" for figure in shown_figures]
            rows.append((name, arm, *cells))
    print_table(columns, rows, left=2, overflow="fold")


@click.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[PART]...")
def bench(arguments: tuple[str, ...]) -> None:
    """Measure das-adapter on a GPU, without weights or a network; `--help` lists the
    parts.
    """
    from das_adapter.bench.run import main as run

    run(arguments)


COMMANDS = (estimate, simulate, bench)
