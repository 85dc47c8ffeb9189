"""A history in a checkpoint is used whole, or refused with what is wrong."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")
from das_adapter.config import HistoryConfig, parse
from das_adapter.core.index import IndexFileError, SuffixIndex
from das_adapter.core.index.store import HistoryStore, newest_in, problems_in
from das_adapter.core.length import RESPONSE
from das_adapter.errors import DasError
from das_adapter.service import checkpoint
from das_adapter.verl import hooks, training

FACTS = {"scope": "problem", "tokenizer": "0123456789abcdef"}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The history of a run on two nodes."""

    def save_parts(folder: Path) -> int:
        for node in (0, 1):
            rng = np.random.default_rng(node)
            with HistoryStore(tmp_path / f"node-{node}") as store:
                for problem in range(2):
                    store.add(2 * problem + node, rng.integers(0, 9, 12), 3)
                store.save(folder / str(node))
        return 2

    target = tmp_path / checkpoint.NAME
    checkpoint.write(
        target, FACTS, np.array([(1, 12, 3), (2, 12, 3)], RESPONSE), save_parts
    )
    return target


def test_a_byte_that_is_damaged_anywhere_is_refused(
    saved: Path, tmp_path: Path
) -> None:
    checkpoint.check(saved, FACTS, "das.history.load")
    files = [path for path in saved.rglob("*") if path.is_file()]
    assert sorted(path.name for path in files) == [
        "0",
        "1",
        "history.json",
        "lengths.npy",
    ]
    with HistoryStore(tmp_path / "store") as store:
        for path in files:
            whole = path.read_bytes()
            for at, by in [(at, by) for at in range(len(whole)) for by in (1, 128)]:
                path.write_bytes(whole[:at] + bytes([whole[at] ^ by]) + whole[at + 1 :])
                if path.name == "history.json" and says(path) == json.loads(whole):
                    continue  # another blank
                with pytest.raises(DasError, match=r"das\.history\.load: "):
                    checkpoint.check(saved, FACTS, "das.history.load")
                if path.parent.name == checkpoint.INDEX:
                    with pytest.raises(IndexFileError):
                        store.absorb(path)
            path.write_bytes(whole)
        assert store.tokens == 0
    checkpoint.check(saved, FACTS, "das.history.load")


def says(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return None


@pytest.mark.parametrize(
    "change", ["a part is missing", "a part too many", "no lengths"]
)
def test_files_that_are_missing_or_too_many_are_refused(
    saved: Path, change: str
) -> None:
    if change == "a part is missing":
        (saved / checkpoint.INDEX / "1").unlink()
    elif change == "a part too many":
        shutil.copy(saved / checkpoint.INDEX / "1", saved / checkpoint.INDEX / "2")
    else:
        (saved / "lengths.npy").unlink()
    with pytest.raises(DasError, match=r"das\.history\.load: found no history in"):
        checkpoint.check(saved, FACTS, "das.history.load")


def test_what_is_loaded_is_read_and_not_mapped(saved: Path, tmp_path: Path) -> None:
    """A file of another machine that is mapped ends the process when that machine is
    gone.
    """
    path = saved / checkpoint.INDEX / "0"
    store = HistoryStore(tmp_path / "store")
    store.absorb(path, [0])
    with path.open("r+b") as file:
        file.truncate(0)
    assert store.tokens == 12
    assert str(path) not in Path("/proc/self/maps").read_text()
    store.save(tmp_path / "again")
    assert (
        problems_in(tmp_path / "again").tolist() == [0]
        and newest_in(tmp_path / "again") == 3
    )
    store.close()


def test_a_vocabulary_of_bytes_has_a_fingerprint() -> None:
    """As of tokenizers of tiktoken's kind, which have special tokens as text."""

    def fingerprint(vocabulary: dict[Any, int]) -> str:
        return checkpoint.facts_of(
            "problem", SimpleNamespace(get_vocab=lambda: vocabulary)
        )["tokenizer"]

    mixed = {b"a": 0, b"\xc3": 1, "<end>": 2}
    assert fingerprint(mixed) == fingerprint(dict(reversed(mixed.items())))
    assert fingerprint(mixed) != fingerprint({**mixed, b"\xc3": 2, "<end>": 1})
    assert fingerprint({"a": 0, "\xe9": 1}) == "de0a423d99e4d4cc"  # checkpoints have it


class Broken:
    def get_vocab(self) -> dict[str, int]:
        raise AttributeError("this tokenizer has no vocabulary")


def test_an_error_after_the_save_does_not_end_the_training(
    tmp_path: Path, caplog: Any
) -> None:
    block = {"drafter": "history"}
    trainer = trainer_of(block, tmp_path, Broken())
    assert hooks.save_history.replacement(lambda self: "saved")(trainer) == "saved"
    assert caplog.text.count("das: the history was not saved with the checkpoint") == 1
    assert "this tokenizer has no vocabulary" in caplog.text


def trainer_of(block: dict[str, Any], folder: Path, tokenizer: Any) -> Any:
    from omegaconf import OmegaConf

    keys = {
        "default_local_dir": str(folder),
        "resume_mode": "auto",
        "resume_from_path": None,
    }
    config = OmegaConf.create(
        {"trainer": keys, "actor_rollout_ref": {"rollout": {"custom": {"das": block}}}}
    )
    return SimpleNamespace(config=config, global_steps=1, tokenizer=tokenizer)


def test_a_history_that_is_switched_off_is_neither_saved_nor_loaded(
    saved: Path, tmp_path: Path, caplog: Any
) -> None:
    block = {"drafter": "history", "history": {"load": False}}
    das = parse(block)
    assert das is not None and das.shares_history and not das.saves_history
    trainer = trainer_of(block, tmp_path, Broken())  # nobody asks for its vocabulary
    (tmp_path / "global_step_1").mkdir()
    saved.rename(tmp_path / "global_step_1" / checkpoint.NAME)
    hooks.save_history.replacement(lambda self: None)(trainer)
    hooks.load_history.replacement(lambda self: None)(trainer)
    assert "das:" not in caplog.text


@pytest.mark.parametrize(
    ("mode", "step", "resumed"),
    [
        ("auto", 0, None),
        ("auto", 5, "runs/global_step_5"),
        ("disable", 5, None),
        ("resume_path", 5, "other/global_step_5"),
    ],
)
def test_the_history_is_that_of_the_checkpoint_from_which_verl_resumes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    step: int,
    resumed: str | None,
) -> None:
    begun: list[tuple[Path | None, int]] = []

    def begin(config: Any, resumed: Path | None, version: int, **_: Any) -> None:
        begun.append((resumed, version))

    monkeypatch.setattr(checkpoint, "begin", begin)
    monkeypatch.setattr(training, "trainer", None)
    words = SimpleNamespace(get_vocab=lambda: {"a": 0})
    trainer = trainer_of({"drafter": "history"}, tmp_path / "runs", words)
    trainer.global_steps = step
    trainer.config.trainer.resume_mode = mode
    trainer.config.trainer.resume_from_path = str(tmp_path / "other/global_step_5")
    hooks.load_history.replacement(lambda self: None)(trainer)
    assert begun == [(tmp_path / resumed if resumed else None, step)]


def with_facts(saved: Path, **changes: Any) -> None:
    """Change what `history.json` says."""
    path = saved / "history.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def with_lengths(saved: Path, content: bytes) -> None:
    """Put other lengths in a saved history, with the right digest."""
    (saved / "lengths.npy").write_bytes(content)
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    with_facts(saved, lengths=digest)


def rows(*found: tuple[int, int, int]) -> bytes:
    """Return a file of lengths."""
    file = io.BytesIO()
    np.save(file, np.array(list(found), RESPONSE).view(np.uint64).reshape(-1, 3))
    return file.getvalue()


LENGTHS = {
    "empty": b"",
    "a bad zip file": b"PK\x03\x04" + b"0" * 90,
    "a pickle": b"\x80\x04.",
    "a header that is no Python": b"\x93NUMPY\x01\x00\x10\x00" + b"{'" * 8,
    "a header that is nested deep": b"\x93NUMPY\x01\x00\x00\x20" + b"(" * 8192,
    "a shape without end": b"\x93NUMPY\x01\x00\x76\x00"
    + b"{'descr': '<u8', 'fortran_order': False, 'shape': (1152921504606846975, 3), }".ljust(
        117
    )
    + b"\n",
    "2^31 tokens": rows((1, 2**31, 0)),
    "2^63 - 1 tokens": rows((1, 50, 0), (1, 2**63 - 1, 0)),
    "less than no token": rows((1, -1, 0)),
    "a weight version of 2^31": rows((1, 50, 2**31)),
    "a weight version below -2^31": rows((1, 50, -(2**31) - 1)),
}


@pytest.mark.parametrize("content", LENGTHS.values(), ids=LENGTHS.keys())
def test_lengths_that_no_run_has_are_refused(saved: Path, content: bytes) -> None:
    with_lengths(saved, content)
    with pytest.raises(DasError, match="found no history in"):
        checkpoint.check(saved, FACTS, "das.history.load")


FACTS_FILES = {
    "nested deep": "[" * 200_000,
    "empty": "",
    "a list": "[1, 2]",
    "a number": "7",
    "too large": " " * 2**23 + "{}",
    "not UTF-8": "\udc80",
}


@pytest.mark.parametrize("text", FACTS_FILES.values(), ids=FACTS_FILES.keys())
def test_a_run_whose_saved_history_is_damaged_resumes_without(
    saved: Path, text: str, caplog: Any
) -> None:
    (saved / "history.json").write_bytes(text.encode(errors="surrogateescape"))
    begin = functools.partial(
        checkpoint.begin, HistoryConfig(), FACTS, "x.das", saved.parent
    )
    begin(5)
    assert caplog.text.count("has no history to resume from") == 1


@pytest.mark.parametrize("parts", [2, None, [], ["0", "1"], [[]], {"0": 1}])
def test_parts_that_history_json_does_not_tell_of_are_refused(
    saved: Path, parts: Any
) -> None:
    with_facts(saved, parts=parts)
    with pytest.raises(DasError, match="found no history in"):
        checkpoint.check(saved, FACTS, "das.history.load")


def test_a_part_of_another_history_is_refused(saved: Path, tmp_path: Path) -> None:
    with HistoryStore(tmp_path / "another") as store:
        store.add(7, np.arange(12), 3)
        store.save(saved / checkpoint.INDEX / "1")
    with pytest.raises(DasError, match="its files are not those"):
        checkpoint.check(saved, FACTS, "das.history.load")


@pytest.mark.parametrize("name", ["history.json", "lengths.npy", "index/0", "index"])
@pytest.mark.parametrize("odd", ["a pipe", "a directory"])
def test_what_is_no_file_in_a_saved_history_is_refused_at_once(
    saved: Path, name: str, odd: str
) -> None:
    path = saved / name
    path.rename(saved.with_name("away"))
    if odd == "a pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(DasError, match="found no history in"):
        checkpoint.check(saved, FACTS, "das.history.load")


def test_a_pipe_is_no_file_of_an_index(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(IndexFileError, match="it is not a file"):
        SuffixIndex.check(tmp_path / "pipe")


@pytest.mark.parametrize("newest", [2**31, -(2**63)])
def test_a_weight_version_that_no_run_has_is_refused(
    saved: Path, newest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "newest_in", lambda path: newest)
    with pytest.raises(DasError, match="weight version"):
        checkpoint.check(saved, FACTS, "das.history.load")


def test_a_history_without_a_text_is_saved_and_read(tmp_path: Path) -> None:
    """As of a node that is home to no problem yet."""
    facts = checkpoint.facts_of("problem", SimpleNamespace(get_vocab=lambda: {"a": 0}))
    target = tmp_path / "saved"
    with HistoryStore(tmp_path / "store") as store:
        checkpoint.write(
            target,
            facts,
            np.array([], RESPONSE),
            lambda index: store.save(index / "0") or 1,
        )
    assert len(checkpoint.check(target, facts, "das.history.load")) == 0


@pytest.mark.parametrize(("version", "newest"), [(1, 1), (3, 3), (7, 3)])
def test_loaded_lengths_are_no_newer_than_the_run(
    saved: Path, version: int, newest: int
) -> None:
    lengths = checkpoint.check(saved, FACTS, "key", version)
    assert lengths["version"].tolist() == [newest] * 2
