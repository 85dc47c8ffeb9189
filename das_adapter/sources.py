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
_VERSION_FILES = (
    "_version.py",
    "version/version",
    "package_info.py",
)
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
    _, *parts = _MODULE.split(text)
    modules = parts[::2]
    listings = parts[1::2]
    read = []
    for module, listing in zip(modules, listings, strict=True):
        for name, signature in _NAME.findall(listing):
            parameters = re.findall(r"\w+", signature)
            symbol = Symbol(
                module=module,
                name=name,
                parameters=tuple(parameters),
                feature=feature,
            )
            read.append(symbol)
    return tuple(read)


class Sources:
    """The source files of one package."""

    def __init__(
        self,
        package: str,
        directory: Path | None = None,
    ) -> None:
        """Read a package; `directory`: of it, None: where Python would import it
        from.
        """
        self._package = package
        if directory is None:
            directory = directory_of(package)
        self._directory = directory
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
        files: dict[str, Path] = {}
        as_package = base / "__init__.py"
        as_module = base.with_suffix(".py")
        if as_module.is_file():
            files[name] = as_module
        elif as_package.is_file():
            files[name] = as_package
        if not module.endswith(".*"):
            return files
        paths = base.glob("*.py")
        for path in sorted(paths):
            if path == as_package:
                continue
            submodule = f"{name}.{path.stem}"
            files[submodule] = path
        return files

    def definitions(self, module: str) -> Definitions:
        """Return what a module defines, by dotted path: the nodes that define it, in
        the order of the source. It is empty where there is no such module.
        """
        known = self._definitions.get(module)
        if known is not None:
            return known
        definitions: Definitions = {}
        files = self.files(module)
        for path in files.values():
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
            for name, node in _defined(tree):
                nodes = definitions.setdefault(name, [])
                nodes.append(node)
        self._definitions[module] = definitions
        return definitions

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
        missing = set(symbol.parameters)
        for node in ast.walk(first.args):
            if isinstance(node, ast.arg):
                missing.discard(node.arg)
        return bool(missing)

    def home(self, module: str, name: str) -> str | None:
        """Return the module from which a name of `package.*` can be imported; None:
        there is none.
        """
        for candidate in self.files(module):
            if name in self.definitions(candidate):
                return candidate
        return None

    def digest(
        self,
        symbol: Symbol,
        classes: bool = False,
    ) -> str | None:
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
            counts = isinstance(node, Function)
            if classes and isinstance(node, ast.ClassDef):
                counts = True
            if counts:
                text += _write(node)
        if not text:
            return None
        content = text.encode()
        digest = hashlib.sha256(content).hexdigest()
        return digest[:_DIGEST_CHARACTERS]

    def _code(
        self,
        module: str,
        name: str,
        imports: int = _IMPORTS,
    ) -> Nodes:
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
                names = (alias.asname, alias.name)
                if name not in names:
                    continue
                further = imports - 1
                return self._code(node.module, alias.name, further)
        return nodes


def directory_of(package: str) -> Path | None:
    """Return the directory from which Python would import a package; None: there is
    none.
    """
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module without a spec has taken its place in this process
        return None
    if spec is None:
        return None
    directories = spec.submodule_search_locations
    if not directories:
        return None
    return Path(directories[0])


def installed_version(
    package: str,
    distributions: Iterable[str],
    directory: Path | None = None,
) -> str | None:
    """Return the version of a package; None: it is not installed.

    What lies beside the package says it, not another build of which only the metadata
    is found first.

    Args:
        distributions: names under which the package may be installed, the one that
            counts most first.
        directory: of the package; None: where Python would import it from.
    """
    if directory is None:
        directory = directory_of(package)
    if directory is not None:
        version = _version_beside(directory, distributions)
        if version is not None:
            return version
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _version_beside(
    directory: Path,
    distributions: Iterable[str],
) -> str | None:
    """Return the version of a package by what lies in its directory and beside it:
    metadata, if they agree with what the package itself says; None: nothing does.
    """
    own = _own_version(directory)
    place = [str(directory.parent)]
    beside: list[str] = []
    for name in distributions:
        builds = importlib.metadata.distributions(name=name, path=place)
        for build in builds:
            beside.append(build.version)
    if own is None:
        return beside[0] if beside else None
    public = public_version(own)
    for version in beside:
        if public_version(version) == public:
            return version
    return own


def public_version(version: str) -> str:
    """Return a version without what a build has added to it."""
    public, _, _ = version.partition("+")
    return public


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
            version = text.strip()
            return version or None
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
            path = above + node.name
            yield path, node
            if above:
                yield from _assigned_attributes(node, above)
        elif isinstance(node, ast.ClassDef):
            path = above + node.name
            yield path, node
            yield from _defined(node, f"{path}.")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name
                path = above + name
                yield path, node
        elif _is_stored(node) and isinstance(node, ast.Name):
            path = above + node.id
            yield path, node
        else:
            # of `if`, `try` and assignments
            yield from _defined(node, above)


def _is_stored(node: ast.AST) -> bool:
    """Return whether a name or an attribute is assigned."""
    context = getattr(node, "ctx", None)
    return isinstance(context, ast.Store)


def _assigned_attributes(function: ast.AST, above: str) -> Iterator[Definition]:
    """Yield the attributes that a method assigns: each dotted path and the node."""
    for node in ast.walk(function):
        if not _is_stored(node):
            continue
        if isinstance(node, ast.Attribute):
            path = above + node.attr
            yield path, node


def _write(value: Any, inside: bool = False) -> str:
    """Return a syntax tree in a form that is the same in every version of Python;
    `inside`: of a function.
    """
    if isinstance(value, list):
        texts = [_write(part, inside) for part in value]
        elements = ",".join(texts)
        return f"[{elements}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    inside = inside or isinstance(value, Function)
    fields = _code_fields(value, inside)
    parts = []
    for name, part in fields.items():
        is_empty = part is None or part == []
        if is_empty:
            continue
        text = _write(part, inside)
        parts.append(f"{name}={text}")
    node_type = type(value).__name__
    arguments = ",".join(parts)
    return f"{node_type}({arguments})"


def _code_fields(node: ast.AST, inside: bool) -> dict[str, Any]:
    """Return the fields of a node that say what code does: no docstring, and inside a
    function no annotation.
    """
    fields: dict[str, Any] = {}
    for name in node._fields:
        if name in _NOT_CODE:
            continue
        fields[name] = getattr(node, name, None)
    is_annotated = isinstance(node, ast.arg | ast.AnnAssign)
    if inside and is_annotated:
        del fields["annotation"]
    if isinstance(node, Function):
        del fields["returns"]
    if isinstance(node, Function | ast.ClassDef):
        docstring = ast.get_docstring(node, clean=False)
        if docstring:
            _, *body = node.body
            fields["body"] = body
    return fields
