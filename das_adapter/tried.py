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
from das_adapter.sources import Sources, Symbol, public_version

logger = logging.getLogger("das_adapter")

RECORD = Path(__file__).with_name("tried_digests.json")
"""By host and function: the versions in which the function has a digest."""
Watched = tuple[Symbol, bool]
"""A symbol, and whether the whole of a class counts."""
Digests = dict[str, str]
"""Digests of functions, by module and name."""
_SETS = {
    "vllm": (compat.V2_COPY, compat.V2_OWN_LENGTHS, compat.ENDS_AT_STOP_STRINGS),
}
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
        """How far the tests count for the installed package, in a few words."""
        if self.changed:
            return f"changed since {self.nearest}"
        if public_version(self.installed) == self.nearest:
            return "tried"
        return f"same code as {self.nearest}"


def watched(host: str) -> dict[str, Watched]:
    """Return the symbols of a host whose code has a digest, by module and name: each
    with whether that of a class counts as a whole.
    """
    known = compat.HOSTS[host]
    found: dict[str, Watched] = {}
    for relied_on in (known, *_SETS.get(host, ())):
        for symbol in relied_on.symbols:
            found[symbol.path] = (symbol, False)
    for symbol in known.callers:
        found[symbol.path] = (symbol, True)
    return found


def digests(host: str, directory: Path | None = None) -> Digests:
    """Return the digests of what a host's code does, by module and name.

    Args:
        host: key of `compat.HOSTS`.
        directory: of the package; None: where Python would import it from.
    """
    package = compat.HOSTS[host].package
    sources = Sources(package, directory)
    found: Digests = {}
    symbols = watched(host)
    for path in sorted(symbols):
        symbol, whole = symbols[path]
        digest = sources.digest(symbol, whole)
        if digest is not None:
            found[path] = digest
    return found


def recorded(host: str) -> dict[str, Digests]:
    """Return the recorded digests of a host's functions, by version."""
    content = RECORD.read_text(encoding="utf-8")
    record = json.loads(content)
    by_version: dict[str, Digests] = {}
    for path, versions_of in record.get(host, {}).items():
        for digest, versions in versions_of.items():
            for version in versions:
                found = by_version.setdefault(version, {})
                found[path] = digest
    return by_version


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
    changed: dict[str, list[str]] = {}
    for version in compat.HOSTS[host].tried:
        if version in known:  # a test holds that all are
            digests_then = known[version]
            changed[version] = _differences(found, digests_then)
    fewest = min(map(len, changed.values()))
    alike = []
    for version, names in changed.items():
        if len(names) == fewest:
            alike.append(version)
    nearest = alike[-1]
    own = public_version(installed)
    if own in alike:
        nearest = own
    return Comparison(installed, nearest, tuple(changed[nearest]))


def _differences(one: Digests, other: Digests) -> list[str]:
    """Return the names whose digests differ, or that only one of both has."""
    found = []
    for path in sorted(one.keys() | other.keys()):
        if one.get(path) != other.get(path):
            found.append(path)
    return found


def some_of(names: Sequence[str]) -> str:
    """Return the first of some functions' names, and how many more there are."""
    text = ", ".join(names[:_NAMED])
    num_more = len(names) - _NAMED
    if num_more > 0:
        text += f" and {num_more} more"
    return text


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
