"""What is read from the sources of other packages: what code does, and of which version
it is.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from das_adapter.sources import Sources, Symbol, installed_version

CODE = '''
"""Docstring of the module."""
from __future__ import annotations
from hostpkg.other import moved as here

class Thing:
    """A thing."""
    size: int = 1

    def method(self, one: int, *, two: str = "a") -> int:
        """What it does."""
        total: int = one  # a comment
        return f"{total!r:>{len(two)}}" if total else ""
'''


def package(tmp_path: Path, code: str = CODE) -> Sources:
    """Write a package with one module of this code, and one that it imports from."""
    root = tmp_path / "hostpkg"
    root.mkdir(exist_ok=True)
    (root / "__init__.py").write_text("")
    (root / "other.py").write_text("def moved(one):\n    return one\n")
    (root / "part.py").write_text(code)
    return Sources("hostpkg", root)


METHOD = Symbol("hostpkg.part", "Thing.method")
THING = Symbol("hostpkg.part", "Thing")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  # a comment", ""),
        ('        """What it does."""\n', ""),
        ("total: int = one", "total: float = one"),
        (") -> int:", ") -> str:"),
        ('two: str = "a"', "two: object = 'a'"),
        ("one: int, *,", "one: int,\n        *,\n       "),
    ],
)
def test_comments_docstrings_annotations_and_layout_are_no_change(
    old: str, new: str, tmp_path: Path
) -> None:
    before = package(tmp_path).digest(METHOD)
    assert before and old in CODE
    assert package(tmp_path, CODE.replace(old, new)).digest(METHOD) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("one: int,", "first: int,"),
        ('"a"', '"b"'),
        ("total: int = one", "total: int = int(one)"),
        ("!r", "!s"),
        ("    def method", "    @property\n    def method"),
        ("    def method", "    async def method"),
    ],
)
def test_what_a_function_does_is_a_change(old: str, new: str, tmp_path: Path) -> None:
    before = package(tmp_path).digest(METHOD)
    assert package(tmp_path, CODE.replace(old, new)).digest(METHOD) != before


def test_the_fields_of_a_class_are_a_change_where_the_whole_of_it_counts(
    tmp_path: Path,
) -> None:
    before = package(tmp_path).digest(THING, classes=True)
    assert package(tmp_path).digest(THING) is None
    for code in (
        CODE.replace("size: int", "size: float"),
        CODE.replace("    size: int = 1\n", ""),
    ):
        assert package(tmp_path, code).digest(THING, classes=True) != before
    assert (
        package(tmp_path, CODE.replace('    """A thing."""\n', "")).digest(
            THING, classes=True
        )
        == before
    )


def test_a_digest_is_the_same_in_every_version_of_python(tmp_path: Path) -> None:
    assert package(tmp_path).digest(METHOD) == "7f179c160c"


def test_the_code_of_what_a_module_imports_counts(tmp_path: Path) -> None:
    sources = package(tmp_path)
    assert sources.digest(Symbol("hostpkg.part", "here")) == sources.digest(
        Symbol("hostpkg.other", "moved")
    )


NAMES = ("hostpkg", "hostpkg-cpu")


def install(at: Path, name: str, version: str, said: str | None = None) -> Path:
    """Put metadata of a package into a directory, and the package itself if it says its
    version.
    """
    info = at / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    return at if said is None else package_of(at, said)


def package_of(at: Path, said: str, file: str = "_version.py") -> Path:
    """Put a package that says its version into a directory."""
    path = at / "hostpkg" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    (at / "hostpkg" / "__init__.py").write_text("")
    path.write_text(said)
    return at


VCS = "__version__ = version = '{}'\n__version_tuple__ = version_tuple = (0,)\n"


def test_of_two_builds_in_one_place_the_one_that_the_package_names_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "hostpkg", "0.27.1+cpu")
    install(tmp_path, "hostpkg-cpu", "0.32.0", VCS.format("0.32.0"))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed_version("hostpkg", NAMES) == "0.32.0"
    install(tmp_path, "hostpkg", "0.32.0+cpu")
    assert installed_version("hostpkg", NAMES) == "0.32.0+cpu", (
        "it selects vLLM's platform"
    )


def test_a_build_laid_over_an_environment_has_its_own_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "environment", "hostpkg", "0.27.1+cpu", VCS.format("0.27.1"))
    install(tmp_path / "overlay", "hostpkg-cpu", "0.32.0", VCS.format("0.32.0"))
    monkeypatch.syspath_prepend(str(tmp_path / "environment"))
    assert installed_version("hostpkg", NAMES) == "0.27.1+cpu"
    monkeypatch.syspath_prepend(str(tmp_path / "overlay"))
    assert installed_version("hostpkg", NAMES) == "0.32.0"


@pytest.mark.parametrize(
    ("file", "said", "version"),
    [
        ("_version.py", VCS.format("0.33.0.dev4+gabc"), "0.33.0.dev4+gabc"),
        ("_version.py", '# Replaced.\ncommit = "b7f"\nversion = "2.60.0"\n', "2.60.0"),
        ("version/version", "0.9.1\n", "0.9.1"),
        (
            "package_info.py",
            'MAJOR = 0\nMINOR = 6\nPATCH = 0\nPRE_RELEASE = "rc0"\n',
            "0.6.0rc0",
        ),
        ("other.py", "", "0.27.1"),  # it says none: what is found by the name
    ],
)
def test_a_checkout_without_metadata_has_the_version_that_it_says(
    file: str, said: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(
        str(install(tmp_path / "environment", "hostpkg", "0.27.1"))
    )
    monkeypatch.syspath_prepend(str(package_of(tmp_path / "checkout", said, file)))
    assert installed_version("hostpkg", NAMES) == version


def test_what_is_not_installed_has_no_version() -> None:
    assert installed_version("hostpkg", NAMES) is None
