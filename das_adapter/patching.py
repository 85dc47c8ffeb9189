"""The form in which das-adapter changes other packages, and the list of what it changes.

A patch is a function that gets what stands at its target and returns what stands there from then on; where that is a
function, it gets the name and the signature of the one whose place it takes. The patch's docstring says what fails
without it, and ends with "Remove this patch when ...". Nothing happens before `apply`, and importing a module of
patches imports none of their targets.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import wrapt

from das_adapter.errors import DasError, UnsupportedHost

logger = logging.getLogger("das_adapter")

_MARK = "__das_patch__"
_REMOVE = "Remove this patch when "


@dataclass(frozen=True)
class Patch:
    """Attributes of another package that are replaced or added."""

    targets: tuple[str, ...]
    """`package.module:Class.attribute` each; of a Ray actor the class that it was made of."""
    replacement: Callable[..., Any]
    """Called with what stands there, None where nothing does, and what `apply` was given."""
    adds: bool = False
    """Whether nothing stands there in the package itself."""

    def apply(self, *context: Any, owner: Any = None) -> None:
        """Put the replacement in its place; a second time changes nothing.

        Args:
            context: further arguments of the replacement.
            owner: the object whose attribute is replaced, where that is one instance of the target's class.

        Raises:
            DasError: another patch of ours is there.
            UnsupportedHost: nothing is there.
        """
        for target in self.targets:
            self._apply_to(target, owner, context)

    def _apply_to(self, target: str, owner: Any = None, context: tuple[Any, ...] = ()) -> None:
        name, (module, _, dotted) = self.replacement.__name__, target.partition(":")
        *path, attribute = dotted.split(".")
        if owner is None:
            owner = importlib.import_module(module)
            for part in path:
                owner = getattr(owner, part, None)
            if actor := getattr(owner, "__ray_metadata__", None):
                owner = actor.modified_class
        stock = getattr(owner, attribute, None)
        first = getattr(stock, _MARK, None)
        if first == name:
            return
        if first is not None:
            raise DasError(f"patch {name}: {target} is patched already, by {first}")
        if (stock is None and not self.adds) or owner is None:
            raise UnsupportedHost(f"patch {name}: found no {target}")
        replaced = self.replacement(stock, *context)
        if replaced is not stock:
            if stock is not None and inspect.isfunction(replaced):
                functools.update_wrapper(replaced, stock)
            setattr(replaced, _MARK, name)
            setattr(owner, attribute, replaced)

    def try_apply(self) -> None:
        """Apply it where that is possible: a package that has changed must not disturb a run without a `das:` block.
        One with a block is stopped by `compat.require`."""
        _try(self.apply)

    def when_imported(self) -> None:
        """Apply it to each target when the target's module is imported."""
        for target in self.targets:
            when_imported(target.partition(":")[0], lambda _, to=target: self._apply_to(to))  # type: ignore[misc]


def when_imported(module: str, act: Callable[[Any], object]) -> None:
    """Do something with a module when it is imported, if it has what is relied on (see `try_apply`)."""
    wrapt.when_imported(module)(lambda imported: _try(lambda: act(imported)))


def _try(act: Callable[[], object]) -> None:
    try:
        act()
    except (UnsupportedHost, AttributeError, ImportError) as error:
        logger.debug("das: %s", error)


def patch(
    *targets: str, since: str, needs: str = "", adds: bool = False, optional: bool = False
) -> Callable[[Callable[..., Any]], Patch]:
    """Make a function the patch of its targets; see `Change` for the arguments that `changes` reads."""
    return lambda replacement: Patch(targets, replacement, adds)


@dataclass(frozen=True)
class Change:
    """One attribute of another package that a patch replaces or adds, as written in the patch's source."""

    patch: str
    source: str
    """Module of the patch, below `das_adapter`."""
    target: str
    why: str
    """What fails without the patch."""
    until: str
    """When the patch can be removed."""
    since: str
    """First version of the package that needs the patch."""
    needs: str = ""
    """Parameters of the target that the patch relies on, separated by commas."""
    adds: bool = False
    optional: bool = False
    """Whether the package may lack the target's class or function, so that the patch does nothing."""


@functools.cache
def changes() -> tuple[Change, ...]:
    """List what das-adapter changes in other packages, read from the sources of its patches; nothing is imported."""
    root = Path(__file__).parent
    found: list[Change] = []
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "\n@patch(" in text:
            found += _written(ast.parse(text), ".".join(path.relative_to(root).with_suffix("").parts))
    return tuple(found)


def _written(module: ast.Module, source: str) -> Iterator[Change]:
    """Read the patches of a module's source, whose targets may name the module's constants."""
    names: dict[str, Any] = {
        node.targets[0].id: node.value.value
        for node in module.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    names["patch"] = lambda *targets, **described: (targets, described)
    for node in (node for node in module.body if isinstance(node, ast.FunctionDef)):
        for call in node.decorator_list:
            if ast.unparse(call).startswith("patch("):
                targets, described = eval(compile(ast.Expression(call), source, "eval"), names)
                why, _, until = " ".join((ast.get_docstring(node) or "").split()).partition(_REMOVE)
                for target in targets:
                    yield Change(node.name, source, target, why.strip(), until.rstrip("."), **described)
