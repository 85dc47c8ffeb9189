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
    "vllm": (
        compat.V2_COPY,
        compat.V2_OWN_LENGTHS,
        compat.ENDS_AT_STOP_STRINGS,
    ),
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
    sets = _SETS.get(host, ())
    watched_symbols: dict[str, Watched] = {}
    for relied_on in (known, *sets):
        for symbol in relied_on.symbols:
            watched_symbols[symbol.path] = (symbol, False)
    for symbol in known.callers:
        watched_symbols[symbol.path] = (symbol, True)
    return watched_symbols


def digests(host: str, directory: Path | None = None) -> Digests:
    """Return the digests of what a host's code does, by module and name.

    Args:
        host: key of `compat.HOSTS`.
        directory: of the package; None: where Python would import it from.
    """
    package = compat.HOSTS[host].package
    sources = Sources(package, directory)
    known: Digests = {}
    symbols = watched(host)
    for path in sorted(symbols):
        symbol, whole = symbols[path]
        digest = sources.digest(symbol, whole)
        if digest is not None:
            known[path] = digest
    return known


def recorded(host: str) -> dict[str, Digests]:
    """Return the recorded digests of a host's functions, by version."""
    content = RECORD.read_text(encoding="utf-8")
    record = json.loads(content)
    of_host = record.get(host, {})
    by_version: dict[str, Digests] = {}
    for path, versions_by_digest in of_host.items():
        for digest, versions in versions_by_digest.items():
            for version in versions:
                of_version = by_version.setdefault(version, {})
                of_version[path] = digest
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
    digests_now = digests(host, directory)
    known = recorded(host)
    changed: dict[str, list[str]] = {}
    for version in compat.HOSTS[host].tried:
        if version not in known:  # a test holds that all are
            continue
        digests_then = known[version]
        changed[version] = _differences(digests_now, digests_then)
    numbers = [len(names) for names in changed.values()]
    fewest = min(numbers)
    alike = []
    for version, names in changed.items():
        if len(names) == fewest:
            alike.append(version)
    nearest = alike[-1]
    own = public_version(installed)
    if own in alike:
        nearest = own
    return Comparison(
        installed=installed,
        nearest=nearest,
        changed=tuple(changed[nearest]),
    )


def _differences(one: Digests, other: Digests) -> list[str]:
    """Return the names whose digests differ, or that only one of both has."""
    paths = one.keys() | other.keys()
    different = []
    for path in sorted(paths):
        if one.get(path) != other.get(path):
            different.append(path)
    return different


def some_of(names: Sequence[str]) -> str:
    """Return the first of some functions' names, and how many more there are."""
    first = names[:_NAMED]
    text = ", ".join(first)
    num_more = len(names) - _NAMED
    if num_more > 0:
        text += f" and {num_more} more"
    return text


def warn(host: str) -> None:
    """Say in one line of the log where the tests have not run on the code of a host."""
    comparison = compare(host)
    if comparison is None or not comparison.changed:
        return
    logger.warning(
        "das: das-adapter's tests have not run on the code of %s %s: changed since"
        " %s: %s",
        host,
        comparison.installed,
        comparison.nearest,
        some_of(comparison.changed),
    )
