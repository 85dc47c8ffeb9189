"""Another user of the node neither reads nor writes a history, nor has this user's processes run anything."""

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

from das_adapter.protocol.spool import FOLDER, SHARED_MEMORY, directory_for, places
from das_adapter.service import janitor

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play another user's part, too")


def stranger(*command: object) -> Any:
    """Let the other user do something, see stranger.py."""
    script = Path(__file__).parent / "stranger.py"
    run = subprocess.run([sys.executable, script, *map(str, command)], capture_output=True, text=True, check=False)
    assert not run.returncode, run.stderr
    return json.loads(run.stdout)


@pytest.fixture
def name() -> Iterator[str]:
    """A history's name; what the other user has put under it goes in the end."""
    made = f"das-history-test-{uuid.uuid4().hex[:8]}"
    yield made
    stranger("give_up", *(path for root in ROOTS for path in root.glob(f"{made}*")))


ROOTS = places()


def tree(*paths: Path) -> dict[str, Any]:
    """What lies at some paths and below."""
    found = [one for path in paths for one in (path, *(path.rglob("*") if not path.is_symlink() else ()))]
    return {str(p): (p.lstat().st_mode, p.lstat().st_uid, p.read_text() if p.is_file() else "") for p in found}


def test_nothing_of_a_history_opens_to_another_user(name: str) -> None:
    engine = Engine(name, grace_s=5.0)
    engine.write(1, TEXT, 0)
    directory = Path(engine.sync()[0].directory)
    engine.write(2, TEXT, 1)  # waits in the spool
    until(lambda: bool(list((directory / FOLDER).glob("batch-*"))))
    inside = [str(path.relative_to(directory)) for path in directory.rglob("*")]
    assert {"users", "writer", "janitor", FOLDER} < set(inside)
    writer, *_ = served_by(directory)  # on a busy machine a second one was started, and ends
    found = stranger("attack", directory, writer.pid, *inside)
    assert len(found) > 60
    assert {attempt: came for attempt, came in found.items() if came != "PermissionError"} == {}
    assert tokens(engine.sync()[0]) == 60


def test_names_that_another_user_took_cost_a_line_and_not_the_history(name: str, caplog: Any) -> None:
    taken = [SHARED_MEMORY / (f"{name}-{number}" if number else name) for number in range(4)]
    stranger("take", *taken)
    before = tree(*taken)
    one, two = Engine(name), Engine(name)
    one.write(1, TEXT, 0)
    published, _ = one.sync()
    assert tokens(published) == 30
    two.write(2, TEXT, 0)
    assert tokens(two.sync()[0]) == 60
    assert Path(published.directory) == SHARED_MEMORY / f"{name}-4"
    assert [r.message for r in caplog.records if "is taken" in r.message] == [
        f"das: history: the name {taken[0]} is taken; the history lies in {published.directory}"
    ]
    janitor.sweep(SHARED_MEMORY, besides="")
    assert tree(*taken) == before
    stranger("give_up", *taken)
    late = Engine(name)
    assert late.sync()[0].directory == published.directory


def test_a_name_that_another_user_took_does_not_choose_the_disk(name: str) -> None:
    """Where shared memory has no room for a history."""
    stranger("take", *(root / name for root in ROOTS))
    directory = directory_for(name, 2**62)
    assert directory == ROOTS[1] / f"{name}-1"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert directory_for(name, 2**62) == directory_for(name, 0) == directory
    directory.rmdir()


def test_a_name_that_another_user_takes_later_costs_the_history_no_text_to_come(name: str) -> None:
    """After the directory went."""
    engine = Engine(name)
    engine.write(1, TEXT, 0)
    directory = Path(engine.sync()[0].directory)
    for process in served_by(directory):
        process.kill()
    subprocess.run(["rm", "-r", directory], check=True)
    stranger("take", directory)
    engine.write(2, TEXT, 1)
    assert tokens(engine.sync()[0]) == 30


@pytest.mark.parametrize("path", ["", os.pathsep], ids=["no path", "a path with an empty entry"])
def test_modules_in_the_working_directory_are_not_run(path: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", path)
    planted = SHARED_MEMORY / f"{name}-planted"
    stranger("plant", planted)
    monkeypatch.chdir(planted)
    engine = Engine(name)
    engine.write(1, TEXT, 0)
    assert tokens(engine.sync()[0]) == 30
    assert not (planted / "ran").exists()
    assert psutil.Process().cwd() == str(planted)
