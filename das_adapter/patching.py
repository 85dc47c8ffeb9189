"""The form in which das-adapter changes other packages, and the list of what it
changes.

A patch is a function that gets what stands at its target and returns what stands there
from then on; where that is a function, it gets the name and the signature of the one
whose place it takes. The patch's docstring says what fails without it, and ends with
"Remove this patch when ...". Nothing happens before `apply`, and importing a module of
patches imports none of their targets.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import wrapt

from das_adapter.errors import DasError, UnsupportedHost

logger = logging.getLogger("das_adapter")

_MARK = "__das_patch__"
"""Attribute of what stands at a target: the name of the patch that put it there."""

Replacement = Callable[..., Any]
"""Gets what stands at a target, None where nothing does, and what `Patch.apply` was
given; returns what stands there from then on.
"""
Context = tuple[Any, ...]


@dataclass(frozen=True)
class Patch:
    """Attributes of another package that are replaced or added."""

    targets: tuple[str, ...]
    """`package.module:Class.attribute` each; of a Ray actor the class that it was made
    of.
    """
    replacement: Replacement
    """The function that is the patch."""
    adds: bool = False
    """Whether nothing stands there in the package itself."""
    since: str = ""
    """First version of the package that needs the patch."""
    needs: str = ""
    """Parameters of the targets that the patch relies on, separated by commas."""
    feature: str = ""
    """What is missing in das-adapter where the package lacks a target; empty: every run
    needs the patch, unless `features.PARTS` has the target's module.
    """
    optional: bool = False
    """Whether the package may lack a target's class or function because nothing is to
    be changed then.
    """

    @property
    def reasons(self) -> dict[str, str]:
        """What its docstring says: what fails without the patch (`why`), and when it
        can be removed (`until`).
        """
        docstring = self.replacement.__doc__ or ""
        words = docstring.split()
        text = " ".join(words)
        why, _, until = text.partition("Remove this patch when ")
        return {
            "why": why.strip(),
            "until": until.rstrip("."),
        }

    def apply(self, *context: Any, owner: Any = None) -> None:
        """Put the replacement in its place; a second time changes nothing.

        Args:
            context: further arguments of the replacement.
            owner: the object whose attribute is replaced, where that is one instance of
                the target's class.

        Raises:
            DasError: another patch of ours is there.
            UnsupportedHost: nothing is there.
        """
        for target in self.targets:
            self._apply_to(target, owner, context)

    def _apply_to(self, target: str, owner: Any = None, context: Context = ()) -> None:
        name = self.replacement.__name__
        module, _, dotted = target.partition(":")
        *path, attribute = dotted.split(".")
        if owner is None:
            owner = _owner(module, path)
        stock = getattr(owner, attribute, None)
        earlier = getattr(stock, _MARK, None)
        if earlier == name:
            return
        if earlier is not None:
            reason = f"{target} is patched already, by {earlier}"
            raise DasError(f"patch {name}: {reason}")
        is_missing = stock is None and not self.adds
        if owner is None or is_missing:
            raise UnsupportedHost(f"patch {name}: found no {target}")
        new = self.replacement(stock, *context)
        if new is stock:
            return
        if stock is not None and inspect.isfunction(new):
            functools.update_wrapper(new, stock)
        setattr(new, _MARK, name)
        setattr(owner, attribute, new)

    def try_apply(self) -> None:
        """Apply the patch where that is possible: a package that has changed must not
        disturb a run without a `das:` block. One with a block is stopped by
        `compat.require`.
        """
        _try(self.apply)

    def when_imported(self) -> None:
        """Apply the patch to each target when the target's module is imported."""
        for target in self.targets:
            module, _, _ = target.partition(":")
            apply = functools.partial(self._apply_when_loaded, target)
            when_imported(module, apply)

    def _apply_when_loaded(self, target: str, _module: object) -> None:
        self._apply_to(target)


def _owner(module: str, path: Sequence[str]) -> Any:
    """Return a module, or the class at a path in it, of a Ray actor the class that it
    was made of; None: it is not there.
    """
    owner: Any = importlib.import_module(module)
    for part in path:
        owner = getattr(owner, part, None)
    actor = getattr(owner, "__ray_metadata__", None)
    if actor:
        return actor.modified_class
    return owner


def when_imported(module: str, act: Callable[[Any], object]) -> None:
    """Do something with a module when it is imported, if it has what is relied on (see
    `try_apply`).
    """

    def act_on(imported: Any) -> None:
        _try(functools.partial(act, imported))

    wrapt.when_imported(module)(act_on)


def _try(act: Callable[[], object]) -> None:
    """Do something with a host, unless it lacks what is needed for it."""
    try:
        act()
    except (UnsupportedHost, AttributeError, ImportError) as error:
        logger.debug("das: %s", error)


def patch(*targets: str, **described: Any) -> Callable[[Replacement], Patch]:
    """Make a function the patch of its targets, which may name constants of its module;
    `described`: further fields.
    """

    def describe(replacement: Replacement) -> Patch:
        return Patch(targets, replacement, **described)

    return describe


@functools.cache
def patches() -> tuple[Patch, ...]:
    """List what das-adapter changes in other packages. Of the modules with patches only
    these and what their targets name are executed: nothing is imported.
    """
    root = Path(__file__).parent
    paths = sorted(root.rglob("*.py"))
    all_patches: list[Patch] = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        if "\n@patch(" not in text:
            continue
        relative = path.relative_to(root)
        inside = relative.with_suffix("")
        parts = (__package__, *inside.parts)
        module = ".".join(parts)
        all_patches += _patches_in(text, path, module)
    return tuple(all_patches)


def _patches_in(text: str, path: Path, module: str) -> list[Patch]:
    """Return the patches in the source of a module: its constants and its patches are
    executed, nothing else.
    """
    statements = []
    for node in ast.parse(text).body:
        if _is_constant(node) or _is_patch(node):
            statements.append(node)
    tree = ast.Module(statements, [])
    code = compile(tree, str(path), "exec")
    names: dict[str, Any] = {
        "__name__": module,
        "patch": patch,
    }
    exec(code, names)
    values = names.values()
    return [value for value in values if isinstance(value, Patch)]


def _is_constant(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.value, ast.Constant)


def _is_patch(node: ast.stmt) -> bool:
    if not isinstance(node, ast.FunctionDef):
        return False
    for decorator in node.decorator_list:
        text = ast.unparse(decorator)
        if text.startswith("patch("):
            return True
    return False
