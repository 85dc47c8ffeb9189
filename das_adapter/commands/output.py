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
from rich.measure import Measurement
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
    help="Print the answer as JSON, and nothing else.",
)
"""The option of every command that reports."""
EXISTING = click.Path(exists=True, path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


_UNBOUNDED = 10_000
"""Columns that no table needs."""
_WHOLE = {"no_wrap": True}
"""Layout of columns whose cells are not wrapped."""


def examples(*lines: str) -> str:
    """Return the end of a command's help: lines that can be typed."""
    head = "Example:" if len(lines) == 1 else "Examples:"
    return "\n".join(["\b", head, *(f"  {line}" for line in lines)])


def print_json(figures: Any) -> None:
    """Print figures as JSON."""
    click.echo(json.dumps(figures, indent=1, default=str))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1, **layout: Any
) -> None:
    """Print a table; the first `left` columns are aligned to the left. `layout`: of
    rich's columns; none: cells are whole, however wide that is.
    """
    layout = layout or _WHOLE
    gap = 1 if layout == _WHOLE else 2
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for number, column in enumerate(columns):
        justify: Literal["left", "right"] = "left" if number < left else "right"
        table.add_column(column, justify=justify, **layout)
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False)
    if layout == _WHOLE:
        # neither a pipe's 80 columns nor a small terminal may cut a figure
        unbounded = console.options.update(max_width=_UNBOUNDED)
        needed = Measurement.get(console, unbounded, table).maximum
        console.width = max(console.width, needed)
    console.print(table)


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
