from __future__ import annotations

import importlib.util
import logging
import re
import zlib
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from das_adapter import trouble

ROOT = Path(__file__).resolve().parents[1]

# A busy machine is no failure, and a revision passes or fails every time; make long
# draws new examples.
hypothesis.settings.register_profile("das", deadline=None, derandomize=True)
hypothesis.settings.register_profile("long", deadline=None, max_examples=500)
hypothesis.settings.load_profile("das")


def pytest_sessionstart() -> None:
    """Refuse to run on the package of another checkout: an editable install stands
    before `PYTHONPATH`.
    """
    package = importlib.util.find_spec("das_adapter")
    found = (
        Path(package.origin).parent if package is not None and package.origin else None
    )
    if (
        found is not None
        and found != ROOT / "das_adapter"
        and (ROOT / "das_adapter") not in found.parents
    ):
        raise pytest.UsageError(
            f"das_adapter is imported from {found}, these tests are in {ROOT}: a"
            " worktree needs an environment of its own (make env)"
        )


@pytest.fixture(autouse=True)
def _loggers_pass_warnings() -> None:
    """What vLLM's HTTP server imports has the root logger and its handlers pass errors
    alone, and vLLM and veRL's server keep their lines from it, in all later tests of a
    process.
    """
    logging.disable(logging.NOTSET)
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    for handler in root.handlers:
        handler.setLevel(logging.NOTSET)
    for name in ("das_adapter", "vllm", "vllm.das_adapter"):
        logger = logging.getLogger(name)
        logger.propagate = True
        logger.disabled = False
        if not logger.isEnabledFor(logging.WARNING):
            logger.setLevel(logging.WARNING)


@pytest.fixture(autouse=True)
def _nothing_was_said() -> None:
    """What the log of an earlier test had is told again in the next."""
    trouble.said = trouble.Said()


def pytest_itemcollected(item: pytest.Item) -> None:
    if "engine" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.engine)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that take longest first, then those of engines, so that few of
    pytest's workers start some; of those that are marked so, each case on one vLLM
    build.
    """
    items.sort(
        key=lambda item: (
            "/e2e/" not in item.nodeid,
            "engine_of" not in getattr(item, "fixturenames", ()),
        )
    )
    for item in items:
        if item.get_closest_marker("one_build") and isinstance(item, pytest.Function):
            build = item.callspec.params["vllm_env"]
            case = item.name.replace(build, "", 1)
            if zlib.crc32(case.encode()) % 2 != (build == "newest"):
                item.add_marker(pytest.mark.long)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several pytest workers, tests that share an expensive fixture stay on one: a
    file's tests on one vLLM build, and those of the same training runs.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Shared(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            if "/unit/" in file or ("/e2e/" in file and "[" in test):
                return nodeid
            build = re.search(r"\[(default|newest)\b", test)
            return f"{file} {build[1] if build else ''}"

    return Shared(config, log)
