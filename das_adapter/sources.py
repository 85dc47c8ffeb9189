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
_VERSION_LINE = re.compile(
    r"^(?:__version__ = )?version = ['\"]([^'\"]+)['\"]", re.MULTILINE
)
_VERSION_PARTS = re.compile(
    r"^(?:MAJOR|MINOR|PATCH|PRE_RELEASE) = ['\"]?([^'\"\s]*)", re.MULTILINE
)
_MODULE = re.compile(r"([\w.]+(?:\.\*)?):\s")
_NAME = re.compile(r"([\w.]+)(\([^)]*\))?")
"""A name in the text that `symbols` reads, and its parameters in brackets."""
_NOT_CODE = ("type_comment", "kind", "type_params")
"""Fields of syntax trees that do not change what code does, or that not every version
of Python has.
"""
_IMPORTS = 3
"""Imports behind which a function is looked for, at most."""
_DIGEST_CHARACTERS = 10

Nodes = list[ast.AST]
Definitions = dict[str, Nodes]
"""The nodes that define a name, by its dotted path."""
Definition = tuple[str, ast.AST]


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
        module = self.module.removesuffix(".*")
        return f"{module}.{self.name}"

    def __str__(self) -> str:
        if not self.parameters:
            return self.path
        parameters = ", ".join(self.parameters)
        return f"{self.path}({parameters})"


def symbols(text: str, feature: str = "") -> tuple[Symbol, ...]:
    """Read symbols of a feature: modules, each followed by its names, with parameters
    if they count.
    """
    parts = _MODULE.split(text)[1:]
    modules = parts[::2]
    listings = parts[1::2]
    found = []
    for module, listing in zip(modules, listings, strict=True):
        for name, signature in _NAME.findall(listing):
            parameters = tuple(re.findall(r"\w+", signature))
            found.append(Symbol(module, name, parameters, feature=feature))
    return tuple(found)


class Sources:
    """The source files of one package."""

    def __init__(self, package: str, directory: Path | None = None) -> None:
        """Read a package; `directory`: of it, None: where Python would import it
        from.
        """
        self._package = package
        self._directory = directory or directory_of(package)
        self._definitions: dict[str, Definitions] = {}
        """What the modules define that were read, by module and dotted path."""

    def files(self, module: str) -> dict[str, Path]:
        """Return the file of a module, by the module's name; of `package.*` those of
        the package and its submodules.
        """
        name = module.removesuffix(".*")
        top, *rest = name.split(".")
        if self._directory is None or top != self._package:
            return {}
        base = self._directory.joinpath(*rest)
        found: dict[str, Path] = {}
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                found.setdefault(name, path)
        if module.endswith(".*"):
            for path in sorted(base.glob("*.py")):
                if path.stem != "__init__":
                    found[f"{name}.{path.stem}"] = path
        return found

    def definitions(self, module: str) -> Definitions:
        """Return what a module defines, by dotted path: the nodes that define it, in
        the order of the source. It is empty where there is no such module.
        """
        if module not in self._definitions:
            found: Definitions = {}
            for path in self.files(module).values():
                text = path.read_text(encoding="utf-8")
                for name, node in _defined(ast.parse(text)):
                    nodes = found.setdefault(name, [])
                    nodes.append(node)
            self._definitions[module] = found
        return self._definitions[module]

    def lacks(self, symbol: Symbol) -> bool:
        """Return whether a symbol is not defined, or is a function without a parameter
        that it must have.
        """
        definitions = self.definitions(symbol.module)
        nodes = definitions.get(symbol.name)
        if nodes is None:
            return True
        first = nodes[0]
        if not isinstance(first, Function):
            return False
        parameters = set[str]()
        for node in ast.walk(first.args):
            if isinstance(node, ast.arg):
                parameters.add(node.arg)
        return not parameters.issuperset(symbol.parameters)

    def home(self, module: str, name: str) -> str | None:
        """Return the module from which a name of `package.*` can be imported; None:
        there is none.
        """
        for found in self.files(module):
            if name in self.definitions(found):
                return found
        return None

    def digest(self, symbol: Symbol, classes: bool = False) -> str | None:
        """Return a digest of what a function does: comments, docstrings, its
        annotations and the form of its source do not count. None: the symbol is no
        function, or is not there.

        Args:
            symbol: where several functions define it, all count; where its module
                imports it, the one that is imported.
            classes: whether the whole of a class has a digest too.
        """
        text = ""
        for node in self._code(symbol.module, symbol.name):
            if isinstance(node, Function) or (
                classes and isinstance(node, ast.ClassDef)
            ):
                text += _written(node)
        if not text:
            return None
        digest = hashlib.sha256(text.encode())
        return digest.hexdigest()[:_DIGEST_CHARACTERS]

    def _code(self, module: str, name: str, imports: int = _IMPORTS) -> Nodes:
        """Return the nodes that define a name, behind so many imports at most."""
        definitions = self.definitions(module)
        nodes = definitions.get(name, [])
        if not imports:
            return nodes
        for node in nodes:
            if not isinstance(node, ast.ImportFrom):
                continue
            if node.level or not node.module:
                continue
            for alias in node.names:
                if name in (alias.asname, alias.name):
                    return self._code(node.module, alias.name, imports - 1)
        return nodes


def directory_of(package: str) -> Path | None:
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
    directory = directory or directory_of(package)
    if directory is not None:
        found = _version_beside(directory, distributions)
        if found is not None:
            return found
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _version_beside(directory: Path, distributions: Iterable[str]) -> str | None:
    """Return the version of a package by what lies in its directory and beside it:
    metadata, if they agree with what the package itself says; None: nothing does.
    """
    own = _own_version(directory)
    place = [str(directory.parent)]
    beside: list[str] = []
    for name in distributions:
        for distribution in importlib.metadata.distributions(name=name, path=place):
            beside.append(distribution.version)
    if own is None:
        return beside[0] if beside else None
    for version in beside:
        if public_version(version) == public_version(own):
            return version
    return own


def public_version(version: str) -> str:
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
        line = _VERSION_LINE.search(text)
        if line is not None:
            return line[1]
        parts = _VERSION_PARTS.findall(text)
        if len(parts) == 4:
            major, minor, patch, pre_release = parts
            return f"{major}.{minor}.{patch}{pre_release}"
    return None


def _defined(scope: ast.AST, above: str = "") -> Iterator[Definition]:
    """Yield what a module or class defines: its dotted path and the node that defines
    it. What a method assigns on an object counts as the class's.
    """
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, Function):
            yield above + node.name, node
            if above:
                for attribute in _assigned_attributes(node):
                    yield above + attribute.attr, attribute
        elif isinstance(node, ast.ClassDef):
            yield above + node.name, node
            yield from _defined(node, f"{above}{node.name}.")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name
                yield above + name, node
        elif _is_stored(node) and isinstance(node, ast.Name):
            yield above + node.id, node
        else:
            yield from _defined(node, above)  # of `if`, `try` and assignments


def _is_stored(node: ast.AST) -> bool:
    """Return whether a name or an attribute is assigned."""
    context = getattr(node, "ctx", None)
    return isinstance(context, ast.Store)


def _assigned_attributes(function: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes that a function assigns."""
    for node in ast.walk(function):
        if _is_stored(node) and isinstance(node, ast.Attribute):
            yield node


def _written(value: Any, inside: bool = False) -> str:
    """Write a syntax tree in a form that is the same in every version of Python;
    `inside`: of a function.
    """
    if isinstance(value, list):
        elements = ",".join(_written(part, inside) for part in value)
        return f"[{elements}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    inside = inside or isinstance(value, Function)
    parts = []
    for name, part in _code_fields(value, inside).items():
        if part is not None and part != []:
            text = _written(part, inside)
            parts.append(f"{name}={text}")
    kind = type(value).__name__
    arguments = ",".join(parts)
    return f"{kind}({arguments})"


def _code_fields(node: ast.AST, inside: bool) -> dict[str, Any]:
    """Return the fields of a node that say what code does: no docstring, and inside a
    function no annotation.
    """
    fields: dict[str, Any] = {}
    for name in node._fields:
        if name not in _NOT_CODE:
            fields[name] = getattr(node, name, None)
    if inside and isinstance(node, ast.arg | ast.AnnAssign):
        fields.pop("annotation")
    if isinstance(node, Function):
        fields.pop("returns")
    if isinstance(node, Function | ast.ClassDef):
        if ast.get_docstring(node, clean=False):
            fields["body"] = node.body[1:]
    return fields
