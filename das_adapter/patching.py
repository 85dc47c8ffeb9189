"""The form in which das-adapter changes other packages.

A patch is a function that gets what stands at its target and returns what stands there from then on. Its docstring says
what fails without it. Nothing happens before `apply`, and importing a module of patches imports none of their targets.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import wrapt

from das_adapter.errors import DasError, UnsupportedHost

logger = logging.getLogger("das_adapter")

PATCHES: list[Patch] = []
"""All that there are, in the order in which they are written down."""
_MARK = "__das_patch__"


@dataclass(frozen=True)
class Patch:
    """One attribute of another package that is replaced or added."""

    target: str
    """`package.module:Class.attribute`."""
    replacement: Callable[..., Any]
    """Called with what stands there, None where nothing does, and what `apply` was given."""
    since: str
    """First version of the package that needs it."""
    upstream: str
    """Issue or pull request that would make it superfluous; empty: none."""
    adds: bool
    """Whether nothing stands there in the package itself."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.replacement.__name__

    @property
    def why(self) -> str:
        """What fails without it."""
        return inspect.getdoc(self.replacement) or ""

    @property
    def module(self) -> str:
        """Where the target is."""
        return self.target.partition(":")[0]

    def apply(self, *context: Any, owner: Any = None) -> None:
        """Put the replacement in its place; a second time changes nothing.

        Args:
            context: further arguments of the replacement.
            owner: the object whose attribute is replaced, where that is one instance of the target's class.

        Raises:
            DasError: another patch of ours is there.
            UnsupportedHost: nothing is there.
        """
        *path, attribute = self.target.partition(":")[2].split(".")
        if owner is None:
            owner = importlib.import_module(self.module)
            for part in path:
                owner = getattr(owner, part, None)
        stock = getattr(owner, attribute, None)
        first = getattr(stock, _MARK, None)
        if first == self.name:
            return
        if first is not None:
            raise DasError(f"patch {self.name}: {self.target} is patched already, by {first}")
        if (stock is None and not self.adds) or owner is None:
            raise UnsupportedHost(f"patch {self.name}: found no {self.target}")
        replaced = self.replacement(stock, *context)
        if replaced is not stock:
            setattr(replaced, _MARK, self.name)
            setattr(owner, attribute, replaced)

    def try_apply(self) -> None:
        """Apply it where that is possible: a package that has changed must not disturb a run without a `das:` block.
        One with a block is stopped by `compat.require`."""
        _try(self.apply)

    def when_imported(self) -> None:
        """Apply it when its module is imported."""
        when_imported(self.module, lambda _: self.apply())


def when_imported(module: str, act: Callable[[Any], None]) -> None:
    """Do something with a module when it is imported, if it has what is relied on (see `try_apply`)."""
    wrapt.when_imported(module)(lambda imported: _try(lambda: act(imported)))


def _try(act: Callable[[], None]) -> None:
    try:
        act()
    except (UnsupportedHost, AttributeError, ImportError) as error:
        logger.debug("das: %s", error)


def patch(target: str, *, since: str, upstream: str = "", adds: bool = False) -> Callable[[Callable[..., Any]], Patch]:
    """Make a function the patch of a target; see `Patch` for the arguments."""

    def make(replacement: Callable[..., Any]) -> Patch:
        made = Patch(target, replacement, since, upstream, adds)
        PATCHES.append(made)
        return made

    return make
