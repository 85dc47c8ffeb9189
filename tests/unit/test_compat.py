"""The table of required symbols finds a missing one before it is needed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from das_adapter import compat
from das_adapter.errors import UnsupportedHost


def lacks(monkeypatch: pytest.MonkeyPatch, package: str, name: str) -> bool:
    compat.missing.cache_clear()
    host = compat.Host(("hostpkg",), "2.0", ("2.1",), (compat.Symbol(package, name, ""),))
    monkeypatch.setitem(compat.HOSTS, "hostpkg", host)
    return bool(compat.missing("hostpkg"))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    root = tmp_path / "hostpkg"
    root.mkdir()
    (root / "__init__.py").write_text("")
    (root / "other.py").write_text("def moved(one, *, two):\n    pass\n")
    (root / "part.py").write_text(
        "try:\n    from x import Imported\nexcept ImportError:\n    Imported = None\n"
        "LEVEL: int = 3\n"
        "from hostpkg.other import moved as here\n"
        "class Thing:\n    field: int\n    def method(self):\n        self.later = 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("hostpkg", None)
    return "hostpkg.part"


@pytest.mark.parametrize("name", ["Imported", "LEVEL", "Thing", "Thing.method", "Thing.field", "Thing.later"])
def test_every_kind_of_definition_is_found_without_importing(
    package: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not lacks(monkeypatch, package, name)
    assert package not in sys.modules


@pytest.mark.parametrize("name", ["Other", "Thing.other", "LEVEL.x"])
def test_what_is_not_there_is_missing(package: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lacks(monkeypatch, package, name)


@pytest.mark.parametrize(("parameters", "missing"), [(("one", "two"), False), (("one", "three"), True)])
def test_parameters_are_looked_for_where_the_function_is_defined(
    package: str, parameters: tuple[str, ...], missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compat.missing.cache_clear()
    host = compat.Host(("hostpkg",), "2.0", ("2.1",), (compat.Symbol(package, "here", "", parameters),))
    monkeypatch.setitem(compat.HOSTS, "hostpkg", host)
    assert bool(compat.missing("hostpkg")) is missing


def test_a_missing_symbol_names_itself_and_the_oldest_version(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compat.missing.cache_clear()
    host = compat.Host(("hostpkg",), "2.0", ("2.1",), (compat.Symbol(package, "Thing.gone", "sampling"),))
    monkeypatch.setitem(compat.HOSTS, "hostpkg", host)
    with pytest.raises(UnsupportedHost, match=r"hostpkg\.part\.Thing\.gone \(sampling\).*hostpkg >= 2\.0"):
        compat.require("hostpkg")


@pytest.mark.parametrize(
    ("name", "found", "state"),
    [
        ("Thing.method", "2.1+cpu", "tried"),
        ("Thing.method", "3.0", "symbols present"),
        ("Thing.method", "1.9", "symbols present"),  # a development version may have them before its number says so
        ("Thing.gone", "1.10", "too old"),
        ("Thing.gone", "2.1", "broken"),
    ],
)
def test_symbols_decide_and_the_version_says_more(
    package: str, name: str, found: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compat.missing.cache_clear()
    host = compat.Host(("hostpkg",), "1.11", ("2.1",), (compat.Symbol(package, name, ""),))
    monkeypatch.setitem(compat.HOSTS, "hostpkg", host)
    monkeypatch.setattr(compat, "version", lambda _: found)
    assert compat.state("hostpkg") == state


def test_what_a_host_may_do_without_is_missing_only_in_part(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compat.missing.cache_clear()
    symbols = [compat.Symbol(package, name, "", optional=True) for name in ("Gone.method", "Thing.gone")]
    symbols.append(compat.Symbol("hostpkg.gone", "Other.method", "", optional=True))
    monkeypatch.setitem(compat.HOSTS, "hostpkg", compat.Host(("hostpkg",), "1", (), tuple(symbols)))
    assert compat.missing("hostpkg") == [symbols[1]]


@pytest.mark.parametrize("host", compat.HOSTS)
def test_the_installed_hosts_have_every_symbol(host: str) -> None:
    if compat.version(host) is None:
        pytest.skip(f"{host} is not installed")
    compat.require(host)
