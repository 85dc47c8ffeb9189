"""The table of required symbols finds a missing one before it is needed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from das_adapter import compat, tried
from das_adapter.errors import UnsupportedHost
from das_adapter.reports.doctor import examine

VERSIONS = Path(__file__).resolve().parents[2] / "docs/versions.md"


def missing(
    monkeypatch: pytest.MonkeyPatch, *symbols: compat.Symbol
) -> list[compat.Symbol]:
    """What the host, of which these symbols are needed, lacks."""
    compat.lacking.cache_clear()
    tried.compare.cache_clear()
    monkeypatch.setattr(
        compat,
        "HOSTS",
        {"hostpkg": compat.Host(("hostpkg",), "2.0", ("2.1",), symbols)},
    )
    return compat.missing("hostpkg")


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


@pytest.mark.parametrize(
    "name", ["Imported", "LEVEL", "Thing", "Thing.method", "Thing.field", "Thing.later"]
)
def test_every_kind_of_definition_is_found_without_importing(
    package: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not missing(monkeypatch, compat.Symbol(package, name))
    assert package not in sys.modules


@pytest.mark.parametrize("name", ["Other", "Thing.other", "LEVEL.x"])
def test_what_is_not_there_is_missing(
    package: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert missing(monkeypatch, compat.Symbol(package, name))


def test_parameters_are_those_of_the_function(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, gone = (
        compat.Symbol("hostpkg.other", "moved", ("one", name))
        for name in ("two", "three")
    )
    assert missing(monkeypatch, there, gone) == [gone]


def test_a_missing_symbol_names_itself_and_the_oldest_version(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert missing(monkeypatch, compat.Symbol(package, "Thing.gone"))
    with pytest.raises(
        UnsupportedHost, match=r"hostpkg\.part\.Thing\.gone;.*hostpkg >= 2\.0"
    ):
        compat.require("hostpkg")


@pytest.mark.parametrize(
    ("name", "found", "state"),
    [
        ("Thing.method", None, "absent"),
        ("Thing.method", "2.1+cpu", "tried"),
        ("Thing.method", "3.0", "same code as 2.1"),
        (
            "Thing.method",
            "1.9",
            "same code as 2.1",
        ),  # a development version may have it before its number says so
        ("Thing.gone", "2.1", "broken"),
    ],
)
def test_symbols_decide_and_the_version_says_more(
    package: str,
    name: str,
    found: str | None,
    state: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert bool(missing(monkeypatch, compat.Symbol(package, name))) == (
        state == "broken"
    )
    monkeypatch.setattr(
        compat, "version", lambda host, *_: found if host == "hostpkg" else None
    )
    monkeypatch.setattr(tried, "recorded", lambda host: {"2.1": tried.digests(host)})
    assert {finding.name: finding.state for finding in examine()}["hostpkg"] == state


def test_what_a_host_may_do_without_is_missing_only_in_part(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    symbols = [
        compat.Symbol(package, name, optional=True)
        for name in ("Gone.method", "Thing.gone")
    ]
    symbols.append(compat.Symbol("hostpkg.gone", "Other.method", optional=True))
    assert missing(monkeypatch, *symbols) == [symbols[1]]


def test_the_versions_of_vllm_that_count_as_tried_are_those_of_the_documentation() -> (
    None
):
    passed = re.findall(
        r"^\| (\d\S+) \|.* \| [^|]*passed[^|]* \|$", VERSIONS.read_text(), re.MULTILINE
    )
    assert compat.HOSTS["vllm"].tried == tuple(passed)


@pytest.mark.parametrize("host", compat.HOSTS)
def test_the_installed_hosts_have_every_symbol(host: str) -> None:
    if compat.version(host) is None:
        pytest.skip(f"{host} is not installed")
    compat.require(host)


def test_every_method_of_verl_that_is_overridden_is_checked() -> None:
    pytest.importorskip("verl")
    pytest.importorskip("vllm")
    from das_adapter.verl.router import DasLoadBalancer
    from das_adapter.verl.server import DasVLLMHttpServer

    listed = {symbol.name for symbol in compat.HOSTS["verl"].relied_on}
    for ours in (DasLoadBalancer, DasVLLMHttpServer):
        (stock,) = ours.__bases__
        methods = {
            name
            for name, value in vars(ours).items()
            if callable(value) and name in vars(stock)
        }
        assert {f"{stock.__name__}.{name}" for name in methods} <= listed
