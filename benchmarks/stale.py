"""List the results of which the measured code has changed since: `python benchmarks/stale.py`, or `make figures`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


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
            yield f"{file.name}: {since}; {made.get('command', 'no command')}"


if __name__ == "__main__":
    print(*stale(), sep="\n")
