"""Files, classes, methods and modules that pages and pictures name are there."""

from __future__ import annotations

import ast
import functools
import html
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from documented import FENCED, PAGES, ROOT

from das_adapter.config import DasConfig

PACKAGE = ROOT / "das_adapter"
SOURCES = (
    "das_adapter",
    "csrc",
    "tests",
    "benchmarks",
    "examples",
    "scripts",
    "patches",
    "docker",
    "docs",
    "configs",
    "constraints",
)
"""Folders with the files that pages name."""
HOST_CLASSES = {
    "AsyncTrajectoryCollector",
    "FutureWarning",
    "LLM",
    "ModelRunnerOutput",
    "ReplayBuffer",
    "SchedulerOutput",
    "SpeculativeAlgorithm",
    "SyncRolloutActor",
    "VllmGeneration",
}
"""Classes of hosts, of vLLM and of Python that pages name."""
HOST_FILES = {"engine_loop.py"}
"""Files of hosts that pages name."""
OTHER_FOLDERS = {"dist/", "train/", "venvs/"}
"""Folders that a build or a host makes, and beginnings of a host's metrics."""
FILE = re.compile(r"(?<![\w./-])[\w./-]*\w\.(?:py|cpp|h)\b")
FOLDER = re.compile(r"(?:\w+/)+")
CLASS = re.compile(r"[A-Z]\w*[a-z]\w*(?:\.\w+)*(?:\(\))?")
MEMBER = re.compile(r"\b([A-Z]\w*[a-z]\w*)\.([a-z_]\w*)")
MODULE = re.compile(r"(?<![\w/.-])das_adapter(?:\.\w+)+")
NAME = re.compile(r"[a-z_]\w*")
CONSTANTS = {"None", "True", "False"}
KEYS = {*DasConfig.model_fields, "model_tokens", "num_draft_tokens"}
"""Keys of the block, and what follows from them."""


@dataclass
class Definitions:
    """The names that the package defines."""

    members: dict[str, set[str]] = field(default_factory=dict)
    """Methods and attributes by class; of all classes of the name."""
    bases: dict[str, set[str]] = field(default_factory=dict)
    """Names of base classes, by class."""
    functions: dict[str, set[str]] = field(default_factory=dict)
    """Functions and methods by file, relative to the package."""
    names: set[str] = field(default_factory=set)
    """Classes, and what modules assign."""
    words: set[str] = field(default_factory=set)
    """Every function, attribute and string of one word."""

    def has_member(self, name: str, member: str) -> bool:
        """Say whether a class or one of its bases has a member."""
        if member in self.members.get(name, ()):
            return True
        bases = self.bases.get(name, set()) - {name}
        return any(self.has_member(base, member) for base in bases)


@functools.cache
def definitions() -> Definitions:
    """Read the package's sources."""
    found = Definitions()
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        functions = found.functions.setdefault(str(path.relative_to(PACKAGE)), set())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.add(node.name)
            elif isinstance(node, ast.ClassDef):
                found.names.add(node.name)
                members = found.members.setdefault(node.name, set())
                members.update(members_of(node))
                bases = found.bases.setdefault(node.name, set())
                bases.update(ast.unparse(base).split("[")[0] for base in node.bases)
                found.words.update(members)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.words.add(node.value)
        for statement in tree.body:
            if isinstance(statement, ast.Assign):
                found.names.update(map(ast.unparse, statement.targets))
        found.words.update(functions)
    return found


def members_of(tree: ast.ClassDef) -> Iterator[str]:
    """Yield the methods and the attributes that a class defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
    for statement in tree.body:
        if isinstance(statement, ast.AnnAssign):
            yield ast.unparse(statement.target)
        elif isinstance(statement, ast.Assign):
            yield from map(ast.unparse, statement.targets)


@functools.cache
def files() -> frozenset[str]:
    """Return the paths of all files and folders that pages may name."""
    paths = [ROOT / "conftest.py"]
    for folder in SOURCES:
        paths += [ROOT / folder, *(ROOT / folder).rglob("*")]
    return frozenset(f"/{path.relative_to(ROOT)}" for path in paths)


def is_file(name: str) -> bool:
    """Say whether a file or a folder ends with these parts."""
    ending = f"/{name.strip('/')}"
    return any(path.endswith(ending) for path in files())


def is_module(name: str) -> bool:
    """Say whether a dotted name is a module of the package, or something in one."""
    if name.startswith("das_adapter._native"):
        return True
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file.is_file():
            rest = parts[length:]
            return (
                not rest or re.search(rf"\b{rest[0]}\b", file.read_text()) is not None
            )
    return False


def unknown_in_text(text: str) -> Iterator[str]:
    """Yield the files, modules and members in a text that are not there."""
    for name in FILE.findall(text):
        if name not in HOST_FILES and not is_file(name):
            yield name
    for name in MODULE.findall(text):
        if not is_module(name):
            yield name
    for name, member in MEMBER.findall(text):
        if name in definitions().members and member != "py":
            if not definitions().has_member(name, member):
                yield f"{name}.{member}"
        elif name not in HOST_CLASSES:
            yield f"{name}.{member}"


def unknown_in_page(text: str, names_parts: bool) -> Iterator[str]:
    """Yield the names in a section of a page that are not there. `names_parts`: words
    in code are names of the package's parts. One in a paragraph with classes is a
    member of one of these.
    """
    for paragraph in FENCED.sub("", text).split("\n\n"):
        codes = re.findall(r"`([^`]+)`", paragraph)
        classes = []
        for code in codes:
            yield from unknown_in_text(code)
            is_folder = FOLDER.fullmatch(code) and code not in OTHER_FOLDERS
            if is_folder and not is_file(code):
                yield code
            if CLASS.fullmatch(code) and code not in CONSTANTS:
                name = code.split(".")[0]
                classes.append(name)
                if name not in definitions().names and name not in HOST_CLASSES:
                    yield name
        if names_parts:
            yield from unknown_parts(codes, classes)


def unknown_parts(codes: list[str], classes: list[str]) -> Iterator[str]:
    """Yield the words in code that are no parts of the package."""
    for code in codes:
        if not NAME.fullmatch(code) or is_file(code) or is_file(f"{code}.py"):
            continue
        if code in KEYS or any(code in f for f in definitions().functions.values()):
            continue
        members = [name for name in classes if definitions().has_member(name, code)]
        is_known = bool(members) if classes else code in definitions().words
        if not is_known:
            yield f"{code} of {' or '.join(classes) or 'the package'}"


def unknown_in_picture(svg: str) -> Iterator[str]:
    """Yield the names in a picture that are not there. Words behind a file are the
    file's functions.
    """
    for line in re.findall(r">([^<>]+)<", svg):
        text = html.unescape(line).strip()
        yield from unknown_in_text(text)
        match = re.fullmatch(r"([\w/]+\.py)((?:\s+\w+)+)", text)
        if match is None:
            continue
        file, words = match.groups()
        functions: set[str] = set()
        for path, names in definitions().functions.items():
            if f"/{path}".endswith(f"/{file}"):
                functions |= names
        for word in words.split():
            if word not in functions:
                yield f"{file} {word}"


@functools.cache
def places() -> dict[str, list[str]]:
    """Return the names that are not there, by section of a page, and by picture."""
    unknown: dict[str, list[str]] = {}
    for page in PAGES:
        names_parts = page.name == "architecture.md"
        for section in re.split(r"^## ", page.read_text(), flags=re.MULTILINE):
            title = section.partition("\n")[0].removeprefix("# ")
            place = f"{page.name}: {title}"
            unknown[place] = sorted(set(unknown_in_page(section, names_parts)))
    for picture in sorted((ROOT / "docs/pictures").glob("*.svg")):
        place = f"pictures/{picture.name}"
        unknown[place] = sorted(set(unknown_in_picture(picture.read_text())))
    return unknown


def test_pages_and_pictures_name_what_is_there() -> None:
    unknown = {place: names for place, names in places().items() if names}
    assert unknown == {}


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("`core/policy.py` and `policy.py`", []),
        ("`core/nothing.py`", ["core/nothing.py"]),
        ("`tests/unit/test_nothing.py::test_it`", ["tests/unit/test_nothing.py"]),
        ("`v2/` and `nothing/`", ["nothing/"]),
        ("`EngineController`, `LLM.get_metrics()`", []),
        ("`NoController`", ["NoController"]),
        ("`Proposer.nothing`", ["Proposer.nothing"]),
        ("`NoController.plan`", ["NoController", "NoController.plan"]),
        ("`das_adapter.verl.server.DasVLLMReplica`", []),
        ("`das_adapter.verl.nothing`", ["das_adapter.verl.nothing"]),
        ("`StepPlanner` has `nowhere`", ["nowhere of StepPlanner"]),
        ("`nothing_of_it`", ["nothing_of_it of the package"]),
    ],
)
def test_a_name_that_is_not_there_is_found(text: str, unknown: list[str]) -> None:
    assert sorted(set(unknown_in_page(text, names_parts=True))) == unknown


def test_a_name_in_a_picture_that_is_not_there_is_found() -> None:
    lines = ("v1/worker.py  time_steps", "v1/worker.py  nothing", "Proposer.nothing")
    svg = "".join(f"<text>{line}</text>" for line in lines)
    assert list(unknown_in_picture(svg)) == ["v1/worker.py nothing", "Proposer.nothing"]
