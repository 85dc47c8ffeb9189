"""What other packages define, read from their source files: nothing of them is
imported.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef
_VERSION_FILES = ("_version.py", "version/version", "package_info.py")
"""Files in which vLLM and Ray, veRL, and NeMo-RL say their own version."""
_NOT_CODE = ("type_comment", "kind", "type_params")
"""Fields of syntax trees that do not change what code does, or that not every version
of Python has.
"""


@dataclass(frozen=True)
class Symbol:
    """Something that must be defined in a module."""

    module: str
    """Its module; one that ends with `.*` stands for the module and, where it is a
    package, its submodules.
    """
    name: str
    """Dotted path inside the module: a class, a function, a method or a module-level
    name.
    """
    parameters: tuple[str, ...] = ()
    """Parameters that it must have under these names; none: only the name counts."""
    optional: bool = False
    """Whether the host may lack the class or function in which it is defined: what
    hooks into it then does nothing. Where the class or function is there, the symbol
    must be.
    """
    feature: str = ""
    """What is missing in das-adapter where the symbol is; empty: every run needs it."""

    @property
    def path(self) -> str:
        """Module and name, by which a message calls it."""
        return f"{self.module.removesuffix('.*')}.{self.name}"

    def __str__(self) -> str:
        signature = f"({', '.join(self.parameters)})" if self.parameters else ""
        return f"{self.path}{signature}"


def symbols(text: str, feature: str = "") -> tuple[Symbol, ...]:
    """Read symbols of a feature: modules, each followed by its names, with parameters
    if they count.
    """
    parts = re.split(r"([\w.]+(?:\.\*)?):\s", text)[1:]
    return tuple(
        Symbol(module, name, tuple(re.findall(r"\w+", parameters)), feature=feature)
        for module, names in zip(parts[::2], parts[1::2], strict=True)
        for name, parameters in re.findall(r"([\w.]+)(\([^)]*\))?", names)
    )


class Sources:
    """The source files of one package."""

    def __init__(self, package: str, directory: Path | None = None) -> None:
        """`directory`: of the package; None: where Python would import it from."""
        self._package = package
        self._directory = directory or place(package)
        self._known: dict[str, dict[str, list[ast.AST]]] = {}

    def files(self, module: str) -> dict[str, Path]:
        """Return the file of a module, by the module's name; of `package.*` those of
        the package and its submodules.
        """
        name = module.removesuffix(".*")
        top, *rest = name.split(".")
        if self._directory is None or top != self._package:
            return {}
        base = self._directory.joinpath(*rest)
        own = [
            path
            for path in (base.with_suffix(".py"), base / "__init__.py")
            if path.is_file()
        ]
        found = {name: own[0]} if own else {}
        if module.endswith(".*"):
            found |= {
                f"{name}.{path.stem}": path
                for path in sorted(base.glob("*.py"))
                if path.stem != "__init__"
            }
        return found

    def definitions(self, module: str) -> dict[str, list[ast.AST]]:
        """Return what a module defines, by dotted path: the nodes that define it, in
        the order of the source. It is empty where there is no such module.
        """
        if module not in self._known:
            found = self._known[module] = {}
            for path in self.files(module).values():
                for name, node in _defined(ast.parse(path.read_text(encoding="utf-8"))):
                    found.setdefault(name, []).append(node)
        return self._known[module]

    def lacks(self, symbol: Symbol) -> bool:
        """Say whether a symbol is not defined, or is a function without a parameter
        that it must have.
        """
        nodes = self.definitions(symbol.module).get(symbol.name)
        if nodes is None:
            return True
        first = nodes[0]
        if not isinstance(first, Function):
            return False
        parameters = {
            arg.arg for arg in ast.walk(first.args) if isinstance(arg, ast.arg)
        }
        return not parameters.issuperset(symbol.parameters)

    def home(self, module: str, name: str) -> str | None:
        """Return the module from which a name of `package.*` can be imported; None:
        there is none.
        """
        return next(
            (found for found in self.files(module) if name in self.definitions(found)),
            None,
        )

    def digest(self, symbol: Symbol, classes: bool = False) -> str | None:
        """Return a digest of what a function does: comments, docstrings, its
        annotations and the form of its source do not count. None: the symbol is no
        function, or is not there.

        Args:
            symbol: where several functions define it, all count; where its module
                imports it, the one that is imported.
            classes: whether the whole of a class has a digest too.
        """
        kinds = (
            ast.FunctionDef,
            ast.AsyncFunctionDef,
            *([ast.ClassDef] if classes else []),
        )
        code = [
            node
            for node in self._code(symbol.module, symbol.name)
            if isinstance(node, kinds)
        ]
        if not code:
            return None
        text = "".join(_written(node) for node in code)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    def _code(self, module: str, name: str, imports: int = 3) -> list[ast.AST]:
        """Return the nodes that define a name, behind so many imports at most."""
        nodes = self.definitions(module).get(name, [])
        for node in nodes:
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and not node.level
                and imports
            ):
                (own,) = (
                    alias.name
                    for alias in node.names
                    if name in (alias.asname, alias.name)
                )
                return self._code(node.module, own, imports - 1)
        return nodes


def place(package: str) -> Path | None:
    """Return the directory from which Python would import a package; None: there is
    none.
    """
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module without a spec has taken its place in this process
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def installed_version(
    package: str, distributions: Iterable[str], directory: Path | None = None
) -> str | None:
    """Return the version of a package; None: it is not installed.

    What lies beside the package says it, not another build of which only the metadata
    is found first.

    Args:
        distributions: names under which the package may be installed, the one that
            counts most first.
        directory: of the package; None: where Python would import it from.
    """
    directory = directory or place(package)
    if directory is not None:
        own = _own_version(directory)
        beside = [
            found.version
            for name in distributions
            for found in importlib.metadata.distributions(
                name=name, path=[str(directory.parent)]
            )
        ]
        agreeing = [
            version for version in beside if own and _public(version) == _public(own)
        ]
        best = agreeing or ([own] if own else beside)
        if best:
            return best[0]
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _public(version: str) -> str:
    """Return a version without what a build has added to it."""
    return version.split("+")[0]


def _own_version(directory: Path) -> str | None:
    """Return what a package itself says, in its source, to be its version; None: it
    does not say it.
    """
    for file in _VERSION_FILES:
        path = directory / file
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".py":
            return text.strip() or None
        if said := re.search(
            r"^(?:__version__ = )?version = ['\"]([^'\"]+)['\"]", text, re.MULTILINE
        ):
            return said[1]
        parts = re.findall(
            r"^(?:MAJOR|MINOR|PATCH|PRE_RELEASE) = ['\"]?([^'\"\s]*)",
            text,
            re.MULTILINE,
        )
        if len(parts) == 4:
            return ".".join(parts[:3]) + parts[3]
    return None


def _defined(scope: ast.AST, above: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield what a module or class defines: its dotted path and the node that defines
    it. What a method assigns on an object counts as the class's.
    """
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, Function):
            yield above + node.name, node
            stored = (
                n
                for n in ast.walk(node)
                if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
            )
            yield from (
                (above + attribute.attr, attribute) for attribute in stored if above
            )
        elif isinstance(node, ast.ClassDef):
            yield above + node.name, node
            yield from _defined(node, f"{above}{node.name}.")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (
                (above + (alias.asname or alias.name), node) for alias in node.names
            )
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield above + node.id, node
        else:
            yield from _defined(node, above)  # of `if`, `try` and assignments


def _written(value: Any, inside: bool = False) -> str:
    """Write a syntax tree in a form that is the same in every version of Python;
    `inside`: of a function.
    """
    if isinstance(value, list):
        return f"[{','.join(_written(part, inside) for part in value)}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = {
        name: getattr(value, name, None)
        for name in value._fields
        if name not in _NOT_CODE
    }
    inside = inside or isinstance(value, Function)
    if inside and isinstance(value, ast.arg | ast.AnnAssign):
        fields.pop("annotation")
    if isinstance(value, Function):
        fields.pop("returns")
    body = fields.get("body")
    if (
        isinstance(value, Function | ast.ClassDef)
        and isinstance(body, list)
        and ast.get_docstring(value, False)
    ):
        fields["body"] = body[1:]
    parts = (
        f"{name}={_written(part, inside)}"
        for name, part in fields.items()
        if part is not None and part != []
    )
    return f"{type(value).__name__}({','.join(parts)})"
