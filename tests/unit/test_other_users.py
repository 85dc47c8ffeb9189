"""Another user of the node neither reads nor writes a history, nor has this user's
processes run anything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_local_history import TEXT, Engine, served_by, tokens, until

from das_adapter import trouble
from das_adapter.engine import alone
from das_adapter.protocol.spool import FOLDER, SHARED_MEMORY, history_roots
from das_adapter.service import janitor

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can play another user's part, too"
)


def stranger(*command: object) -> Any:
    """Let the other user do something, see stranger.py."""
    script = Path(__file__).parent / "stranger.py"
    run = subprocess.run(
        [sys.executable, script, *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not run.returncode, run.stderr
    return json.loads(run.stdout)


@pytest.fixture
def name() -> Iterator[str]:
    """A history's name; what the other user has put under it goes in the end."""
    made = f"das-history-test-{uuid.uuid4().hex[:8]}"
    yield made
    stranger("give_up", *(path for root in ROOTS for path in root.glob(f"{made}*")))


ROOTS = history_roots()


def tree(*paths: Path) -> dict[str, Any]:
    """What lies at some paths and below."""
    found = [
        one
        for path in paths
        for one in (path, *(path.rglob("*") if not path.is_symlink() else ()))
    ]
    return {
        str(p): (
            p.lstat().st_mode,
            p.lstat().st_uid,
            p.read_text() if p.is_file() else "",
        )
        for p in found
    }


def test_nothing_of_a_history_opens_to_another_user(name: str) -> None:
    engine = Engine(name, grace_s=5.0)
    engine.write(1, TEXT, 0)
    directory = Path(engine.sync().directory)
    engine.write(2, TEXT, 1)  # waits in the spool
    until(lambda: bool(list((directory / FOLDER).glob("batch-*"))))
    inside = [str(path.relative_to(directory)) for path in directory.rglob("*")]
    assert {"users", "writer", "janitor", FOLDER} < set(inside)
    # on a busy machine a second one was started, and ends
    writer, *_ = served_by(directory)
    found = stranger("attack", directory, writer.pid, *inside)
    assert len(found) > 60
    assert {
        attempt: came for attempt, came in found.items() if came != "PermissionError"
    } == {}
    assert tokens(engine.sync()) == 60


def test_a_name_that_another_user_took_costs_the_history_as_long_as_it_is_taken(
    name: str, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # with a directory, a file, a link, a pipe
    names = [f"{name}{kind}" for kind in range(4)]
    roots = history_roots()
    taken = [root / name for root in roots for name in names]
    stranger("take", *taken)
    before = tree(*taken)
    engines = [Engine(name) for name in names]
    for engine in engines:
        engine.write(1, TEXT, 0)
        assert engine.sync() is None
    for engine, path in zip(engines, taken, strict=False):
        assert str(path) in engine.trouble
    assert "engines go on with what is mapped" in caplog.text
    for root in roots:
        janitor.sweep(root, besides="")
    assert tree(*taken) == before
    stranger("give_up", *taken[:4])
    # a writer starts slowly on a busy machine
    monkeypatch.setattr(trouble, "IMPATIENCE_S", alone.PATIENCE_S)
    published = [engine.sync() for engine in engines]
    assert [tokens(one) for one in published] == [30] * 4
    assert {Path(one.directory).parent for one in published} == {SHARED_MEMORY}
    stranger("give_up", *taken[4:])


def test_a_name_that_another_user_took_in_one_place_moves_the_history_to_the_next(
    name: str, caplog: Any
) -> None:
    taken = SHARED_MEMORY / name
    stranger("take", taken)
    engine = Engine(name)
    engine.write(1, TEXT, 0)
    published = engine.sync()
    assert tokens(published) == 30
    assert Path(published.directory).parent == history_roots()[1]
    assert str(taken) in caplog.text
    stranger("give_up", taken)


@pytest.mark.parametrize(
    "path", ["", os.pathsep], ids=["no path", "a path with an empty entry"]
)
def test_modules_in_the_working_directory_are_not_run(
    path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", path)
    planted = SHARED_MEMORY / f"{name}-planted"
    stranger("plant", planted)
    monkeypatch.chdir(planted)
    engine = Engine(name)
    engine.write(1, TEXT, 0)
    assert tokens(engine.sync()) == 30
    assert not (planted / "ran").exists()
    assert psutil.Process().cwd() == str(planted)
