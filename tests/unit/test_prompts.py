"""The prompts of problems are kept beside the texts of the history, once each."""

from __future__ import annotations

import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")
import ray

from das_adapter.config import DasConfig, HistoryConfig
from das_adapter.core import tuning
from das_adapter.protocol.label import Label
from das_adapter.protocol.messages import Published, Trajectory, pack
from das_adapter.protocol.spool import FOLDER, TEXTS, put_batch, put_file
from das_adapter.service import checkpoint, ledger, node, session
from das_adapter.service.ledger import Synced
from das_adapter.service.node import NodeHistory
from das_adapter.service.prompts import Prompts, read_prompts
from das_adapter.service.session import Session
from das_adapter.service.writer import Writer
from das_adapter.trouble import Peer

TEXT = np.arange(30, dtype=np.int32).tobytes()
MAX_BYTES = 2**24


def ids(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def test_each_problem_has_its_shortest_prompt_once(tmp_path: Path) -> None:
    """The prompt of a later turn begins with that of the first."""
    path = tmp_path / "prompts"
    prompts = Prompts(path, 10_000)
    prompts.add([(1, ids(1, 2, 3)), (2, ids(7)), (1, ids(1, 2, 3, 4))])
    size = path.stat().st_size
    prompts.add([(1, ids(1, 2, 3, 4, 5)), (2, ids(7)), (3, b"")])
    assert path.stat().st_size == size == prompts.nbytes
    prompts.add([(1, ids(1, 2))])
    assert read_prompts(path) == {1: ids(1, 2), 2: ids(7)}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = Prompts(path, 10_000)
    again.add([(1, ids(1, 2)), (4, ids(5))])
    assert read_prompts(path) == {2: ids(7), 1: ids(1, 2), 4: ids(5)}


def test_the_older_prompts_go_where_there_are_too_many(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    prompts = Prompts(path, 1000)
    for problem in range(100):
        prompts.add([(problem, ids(*range(10)))])
        assert path.stat().st_size <= 1000
    kept = list(read_prompts(path))
    assert kept == list(range(kept[0], 100)) and len(kept) >= 8
    prompts.add([(1000, ids(*range(300)))])  # it alone is too large
    assert list(read_prompts(path)) == kept
    prompts.add([(0, ids(1))])  # it comes again
    assert 0 in read_prompts(path)


def test_a_damaged_file_keeps_what_stands_before_the_damage(
    tmp_path: Path, caplog: Any
) -> None:
    path = tmp_path / "prompts"
    Prompts(path, 10_000).add([(1, ids(1, 2)), (2, ids(3, 4)), (3, ids(5, 6))])
    whole = path.read_bytes()
    third = len(whole) // 3
    for at in range(third, 2 * third):
        caplog.clear()
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert read_prompts(path) == {1: ids(1, 2)}
        assert len(caplog.records) == 1
    path.write_bytes(whole[:-1])
    prompts = Prompts(path, 10_000)
    prompts.add([(4, ids(9))])
    assert read_prompts(path) == {1: ids(1, 2), 2: ids(3, 4), 4: ids(9)}
    path.unlink()  # somebody removes it
    prompts.add([(1, ids(1, 2))])
    assert read_prompts(path) == {1: ids(1, 2)}


def opened(root: Path) -> Writer:
    return Writer(HistoryConfig(max_bytes=MAX_BYTES), root / "das-history-test", 5.0)


def test_prompts_stay_where_a_history_begins_anew(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    put_batch(writer.directory, "engine", [Trajectory(1, TEXT, 0, ids(1, 2))])
    [(file, texts)] = writer.read_files()
    writer.keep_texts(file, texts)
    writer.publish()
    for published in writer.directory.glob("segments-*"):
        published.unlink()
    writer.restore()
    writer.store.close()
    for manifest in writer.directory.glob("manifest*"):
        manifest.write_bytes(b"damaged")
    again = opened(tmp_path)
    again.prompts.save(tmp_path / "saved" / "0")
    assert read_prompts(tmp_path / "saved" / "0") == {1: ids(1, 2)}
    again.store.close()


def test_prompts_that_can_not_be_written_cost_no_text(
    tmp_path: Path, caplog: Any
) -> None:
    writer = opened(tmp_path)
    (writer.directory / "prompts").mkdir()
    put_batch(writer.directory, "engine", [Trajectory(1, TEXT, 0, ids(1, 2))])
    [(file, texts)] = writer.read_files()
    writer.keep_texts(file, texts)
    writer.publish()
    assert writer.store.tokens == 30
    assert "das: history: prompts are not kept" in caplog.text
    writer.store.close()


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the ledger answers."""
    found: dict[str, Any] = {
        "start": (None, 0, 0),
        "sync": Synced(0, np.zeros(0, "u8"), ()),
        "add": None,
    }

    class RunLedger:
        def __getattr__(self, name: str) -> Any:
            return SimpleNamespace(remote=lambda *_: found[name])

    monkeypatch.setattr(ledger, "wait_for_answer", lambda call, timeout_s: call)
    monkeypatch.setattr(ledger, "of_ledger", Peer())
    monkeypatch.setattr(ledger, "running_ledger", RunLedger)
    monkeypatch.setattr(ledger, "history_names", tuple)
    monkeypatch.setattr(ledger, "end_with_job", lambda: None)
    monkeypatch.setattr(node, "_own_object_store_bytes", lambda: 0)
    monkeypatch.setattr(session, "ledger", RunLedger)
    monkeypatch.setattr(session, "history_name", lambda: "das_history:1:here")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    return found


def test_a_saved_history_has_the_prompts_and_gives_them_to_the_next_run(
    answers: dict[str, Any], tmp_path: Path
) -> None:
    config = HistoryConfig(max_bytes=MAX_BYTES)
    first = NodeHistory(config, "das-history-a", str(tmp_path), 0.1)
    first.sync(1, 0)
    away = [Trajectory(2, TEXT, 1, ids(4))]
    put_file(first.writer.directory, f"{TEXTS}-z", pack(away))
    put_batch(first.writer.directory, "engine", [Trajectory(1, TEXT, 1, ids(1, 2))])
    saved = tmp_path / checkpoint.NAME
    part = saved / checkpoint.INDEX / "0"
    part.parent.mkdir(parents=True)
    first.save(str(part))
    assert read_prompts(checkpoint.prompts_file(part)) == {1: ids(1, 2), 2: ids(4)}
    assert checkpoint.index_files(saved) == [part]

    answers["start"] = (str(saved), 0, 0)
    second = NodeHistory(config, "das-history-b", str(tmp_path), 0.1)
    second.sync(1, 0)
    put_batch(second.writer.directory, "engine", [Trajectory(3, TEXT, 1, ids(8))])
    again = tmp_path / "again" / checkpoint.INDEX / "0"
    again.parent.mkdir(parents=True)
    second.save(str(again))
    kept = read_prompts(checkpoint.prompts_file(again))
    assert kept == {1: ids(1, 2), 2: ids(4), 3: ids(8)}


def test_an_engine_leaves_each_prompt_once_in_a_weight_version(
    answers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = opened(tmp_path)
    directory = str(writer.directory)
    history = SimpleNamespace(
        sync=SimpleNamespace(
            remote=lambda *_: (Published(directory, 0), answers["sync"])
        )
    )
    monkeypatch.setattr(node, "history_here", lambda config: history)

    def left_by(das: DasConfig) -> list[bytes]:
        one = Session(das, lambda *_: [[{}]])
        one.sync(0)
        for version in (1, 2):
            for prompt in ((), (5, 6), (5, 6)):
                label = Label(problem=9, seed=1)
                one.record_response(label, [1, 2], 0.0, 1.0, version, prompt)
            one.sync(version)
        prompts = []
        for path, texts in writer.read_files():
            prompts += [text.prompt for text in texts]
            (writer.directory / FOLDER / path).unlink()
        return prompts

    assert left_by(DasConfig()) == [b"", ids(5, 6), b""] * 2
    for history_config in ({"load": False}, {"scope": "global"}):
        das = DasConfig(history=HistoryConfig(**history_config))
        assert left_by(das) == [b""] * 6
    writer.store.close()


def test_the_prompts_limit_is_a_part_of_the_historys(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    limit = MAX_BYTES // tuning.PROMPTS_SHARE
    prompt = bytes(4 * 10_000)
    for problem in range(30):
        text = Trajectory(problem, TEXT, 0, prompt)
        writer.keep_texts("batch-engine-0", [text])
    assert limit // 2 - len(prompt) <= writer.prompts.nbytes <= limit
    writer.store.close()
