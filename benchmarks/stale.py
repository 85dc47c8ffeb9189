"""List the results of which the measured code has changed since, or make some anew.

    python benchmarks/stale.py [RESULT.json ...]

Without names, as `make figures`, a line for each result; with names, as `make figures RESULTS="A.json B.json"`, the
commands of `commands.py`, one after the other. `python tools/reference.py` then writes the pages' figures.
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
    """Return where a result says what made it: under `provenance`, in its first run, or at the top."""
    runs = [run["provenance"] for run in [content, *content.values()] if isinstance(run, dict) and "provenance" in run]
    found: dict[str, Any] = runs[0] if runs else content
    return found


def changes(revision: str | None, measures: list[str], root: Path = ROOT) -> int | None:
    """Count the commits that changed some paths since a revision; None: the repository does not have it."""
    command = ["git", "rev-list", "--count", f"{revision}..HEAD", "--", *measures]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return int(done.stdout) if revision and done.returncode == 0 else None


def stale() -> Iterator[str]:
    """Yield a line for each result whose code has changed, or that does not say of which revision it is."""
    for file in sorted(RESULTS.glob("*.json")):
        made = origin(json.loads(file.read_text()))
        count = changes(made.get("revision"), made["measures"])
        if count != 0:
            since = "no revision" if count is None else f"{count} changes since {made['revision']}"
            yield f"{file.name}: {since}; {COMMANDS.get(file.name, 'not by a command of this list')}"


def main(names: Sequence[str]) -> None:
    """Make the results with these names anew; without names, list those that are stale."""
    if unknown := sorted(set(names) - COMMANDS.keys()):
        sys.exit(f"no command for {', '.join(unknown)}; there is one for {', '.join(COMMANDS)}")
    failed = [name for name in names if not make(name)]
    if failed:
        sys.exit(f"not made: {', '.join(failed)}")
    if not names:
        print(*stale(), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
