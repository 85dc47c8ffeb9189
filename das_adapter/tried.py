"""Whether the tests have run on the code of a host that is installed: not on its
version number, on what it does.

Of every function that is patched, overridden or called, and of the code that calls
das-adapter or whose records it reads, a digest is recorded for each version that the
tests have run on. `scripts/digests.py` writes the record.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from das_adapter import compat
from das_adapter.sources import Sources, Symbol

logger = logging.getLogger("das_adapter")

RECORD = Path(__file__).with_name("tried_digests.json")
"""By host and function: the versions in which the function has a digest."""
_SETS = {"vllm": (compat.V2_COPY, compat.V2_ASKS, compat.ENDS_AT_STOP_STRINGS)}
"""What is relied on, beside `HOSTS`, where an engine can do more."""
_NAMED = 5
"""How many functions a message names."""


@dataclass(frozen=True)
class Comparison:
    """How the code of an installed host differs from the code that the tests have run
    on.
    """

    installed: str
    """Version of the installed package."""
    nearest: str
    """The version, of those that were tried, of whose functions the fewest have
    changed; the newest of several.
    """
    changed: tuple[str, ...]
    """These functions and classes, by module and name: what they do has changed, or
    they are gone, or new.
    """

    @property
    def state(self) -> str:
        """Say in a few words how far the tests count for the installed package."""
        if self.changed:
            return f"changed since {self.nearest}"
        return (
            "tried"
            if self.installed.split("+")[0] == self.nearest
            else f"same code as {self.nearest}"
        )


def watched(host: str) -> dict[str, tuple[Symbol, bool]]:
    """Return the symbols of a host whose code has a digest, by module and name: each
    with whether that of a class counts as a whole.
    """
    known = compat.HOSTS[host]
    relied_on = (
        symbol for one in (known, *_SETS.get(host, ())) for symbol in one.symbols
    )
    found = {symbol.path: (symbol, False) for symbol in relied_on}
    return found | {symbol.path: (symbol, True) for symbol in known.callers}


def digests(host: str, directory: Path | None = None) -> dict[str, str]:
    """Return the digests of what a host's code does, by module and name.

    Args:
        host: key of `compat.HOSTS`.
        directory: of the package; None: where Python would import it from.
    """
    sources = Sources(compat.HOSTS[host].package, directory)
    found = {
        path: sources.digest(symbol, whole)
        for path, (symbol, whole) in sorted(watched(host).items())
    }
    return {path: digest for path, digest in found.items() if digest is not None}


def recorded(host: str) -> dict[str, dict[str, str]]:
    """Return the recorded digests of a host's functions, by version."""
    versions: dict[str, dict[str, str]] = {}
    for path, found in (
        json.loads(RECORD.read_text(encoding="utf-8")).get(host, {}).items()
    ):
        for digest, same in found.items():
            for version in same:
                versions.setdefault(version, {})[path] = digest
    return versions


@functools.cache
def compare(host: str, directory: Path | None = None) -> Comparison | None:
    """Compare the code of a host with that of the versions on which the tests have run.
    None: it is not installed.

    Args:
        host: key of `compat.HOSTS`.
        directory: of the package; None: where Python would import it from.
    """
    installed = compat.version(host, directory)
    if installed is None:
        return None
    found = digests(host, directory)
    known = recorded(host)
    # a test holds that all are
    tried = (version for version in compat.HOSTS[host].tried if version in known)
    changed = {version: _differences(found, known[version]) for version in tried}
    fewest = min(map(len, changed.values()))
    alike = [version for version in changed if len(changed[version]) == fewest]
    own = installed.split("+")[0]
    nearest = own if own in alike else alike[-1]
    return Comparison(installed, nearest, tuple(changed[nearest]))


def _differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return sorted(path for path in {*one, *other} if one.get(path) != other.get(path))


def some_of(names: Sequence[str]) -> str:
    """Name the first of some functions, and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def warn(host: str) -> None:
    """Say in one line of the log where the tests have not run on the code of a host."""
    found = compare(host)
    if found is not None and found.changed:
        logger.warning(
            "das: das-adapter's tests have not run on the code of %s %s: changed since"
            " %s: %s",
            host,
            found.installed,
            found.nearest,
            some_of(found.changed),
        )
