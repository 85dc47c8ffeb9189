"""The output of all commands: tables, JSON, and bars on a terminal while something
takes long.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

as_json = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print the figures as JSON, and nothing else.",
)
"""The option of every command that reports."""
EXISTING = click.Path(exists=True, path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


def print_json(figures: Any) -> None:
    """Print figures as JSON."""
    click.echo(json.dumps(figures, indent=1, default=str))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1, **layout: Any
) -> None:
    """Print a table; the first `left` columns are aligned to the left. `layout`: of
    rich's columns; none: cells are not wrapped.
    """
    table = Table(box=None, pad_edge=False)
    layout = layout or {"no_wrap": True}
    for number, column in enumerate(columns):
        justify: Literal["left", "right"] = "left" if number < left else "right"
        table.add_column(column, justify=justify, **layout)
    for row in rows:
        table.add_row(*row)
    Console(markup=False).print(table)


@contextlib.contextmanager
def bar(total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on stderr where that is a terminal. The function that it yields is
    called with a text when one of `total` parts begins.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    shown = Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with shown:
        task = shown.add_task("", total=total)
        num_done = iter(range(total))

        def begin_part(text: str) -> None:
            shown.update(task, description=text, completed=next(num_done, total))

        yield begin_part
