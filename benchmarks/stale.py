"""List the results of which the measured code has changed since, or make some anew.

    python benchmarks/stale.py [RESULT.json ...]

Without names, as `make figures`, a line for each result; with names, as `make figures
RESULTS="A.json B.json"`, the commands of `commands.py`, one after the other. `python
scripts/reference.py` then writes the pages' figures.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from commands import COMMANDS, RESULTS, ROOT, make


def origin(content: Any) -> dict[str, Any]:
    """Return what a result says of its making: under `provenance`, or there in its
    first part.
    """
    parts = [part for part in [content, *content.values()] if isinstance(part, dict)]
    return next(part["provenance"] for part in parts if "provenance" in part)


def changes(revision: str | None, measures: list[str], root: Path = ROOT) -> int | None:
    """Count the commits that changed some paths since a revision; None: the repository
    does not have it.
    """
    command = ["git", "rev-list", "--count", f"{revision}..HEAD", "--", *measures]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=False
    )
    return int(done.stdout) if revision and done.returncode == 0 else None


def stale() -> Iterator[str]:
    """Yield a line for each result that is not there, whose code has changed, or that
    does not say of which revision it is.
    """
    for name, command in COMMANDS.items():
        if not (RESULTS / name).exists():
            yield f"{name}: not there; {command}"
            continue
        made = origin(json.loads((RESULTS / name).read_text()))
        count = changes(made.get("revision"), made["measures"])
        if count != 0:
            since = (
                "no revision"
                if count is None
                else f"{count} changes since {made['revision']}"
            )
            yield f"{name}: {since}; {command}"


def main(names: Sequence[str]) -> None:
    """Make the results with these names anew; without names, list those that are
    stale.
    """
    if unknown := sorted(set(names) - COMMANDS.keys()):
        sys.exit(
            f"no command for {', '.join(unknown)}; there is one for"
            f" {', '.join(COMMANDS)}"
        )
    failed = [name for name in names if not make(name)]
    if failed:
        sys.exit(f"not made: {', '.join(failed)}")
    if not names:
        print(*stale(), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
