"""The `das-adapter` command."""

from __future__ import annotations

from typing import Any

import click

from das_adapter import __version__
from das_adapter.commands import forecasts, installation, runs
from das_adapter.commands.output import examples
from das_adapter.errors import DasError


class _Commands(click.Group):
    """Commands that end with a message, without a traceback, where das-adapter refuses
    something, or where a file can't be read or written.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # click ends quietly where nobody reads on
            raise
        except (DasError, OSError) as error:
            raise _error_class(ctx)(str(error)) from None
        except ModuleNotFoundError as error:
            reason = str(error)
            if error.name == "plotly":
                reason += "; the page needs das-adapter[plot]"
            raise _error_class(ctx)(reason) from None


class _CompareError(click.ClickException):
    exit_code = 2  # 1 says that tokens differ


def _error_class(ctx: click.Context) -> type[click.ClickException]:
    """Return the error with which the command that was called ends."""
    if ctx.invoked_subcommand == "compare":
        return _CompareError
    return click.ClickException


@click.group(
    cls=_Commands,
    epilog=examples("das-adapter doctor", "das-adapter COMMAND --help"),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__)
def main() -> None:
    """Lossless speculative rollouts, drafted from the run's own history: for veRL,
    NeMo-RL, TRL, SkyRL and every other trainer that runs vLLM.
    """


for _module in (installation, runs, forecasts):
    for _command in _module.COMMANDS:
        main.add_command(_command)

if __name__ == "__main__":
    main()
