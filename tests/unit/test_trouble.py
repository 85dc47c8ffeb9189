"""Who hangs is waited for once, and what goes wrong again and again is said once."""

from __future__ import annotations

from typing import Any

import pytest

from das_adapter import trouble
from das_adapter.trouble import IMPATIENCE_S, Peer, log_once, reason


def test_a_peer_that_hangs_is_waited_for_in_full_once_until_it_answers_again() -> None:
    peer = Peer()
    assert peer.patience_s(30.0) == 30.0
    for _ in range(3):
        peer.failed("no answer", TimeoutError("hangs"))
        assert peer.patience_s(30.0) == IMPATIENCE_S
        assert peer.patience_s(0.25) == 0.25
    assert peer.trouble == "TimeoutError: hangs"
    peer.answered()
    assert (peer.patience_s(30.0), peer.trouble) == (30.0, "")


def test_each_kind_of_failure_is_one_line_until_the_peer_answers(caplog: Any) -> None:
    peer = Peer()
    for number in range(100):
        peer.failed("no answer", TimeoutError(f"none within {number} s"))
        peer.failed("no answer", OSError(28, "No space", f"/x/{number:032x}.tmp"))
    assert len(caplog.records) == 2
    assert "/x/" in caplog.text and "Traceback" not in caplog.text


def test_a_peer_that_answers_now_and_then_is_one_line_a_minute(
    caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Peer()
    for _ in range(5):
        peer.failed("no answer", TimeoutError())
        peer.answered()
    assert len(caplog.records) == 1
    monkeypatch.setattr(trouble, "AGAIN_S", 0.0)
    peer.failed("no answer", TimeoutError())
    assert len(caplog.records) == 2


def test_what_the_log_has_had_is_remembered_for_a_bounded_number_of_lines() -> None:
    for number in range(3000):
        log_once(f"about {number:x}")
    assert len(trouble.said) <= 1024


def test_an_error_is_told_in_one_line_with_its_path() -> None:
    assert "/dev/shm/x" in reason(OSError(30, "Read-only file system", "/dev/shm/x"))
    assert reason(ValueError()) == "ValueError"
    traceback = "Traceback:\n a\n b\n c\nKeyError: 'why'"
    assert reason(RuntimeError(traceback)) == "RuntimeError: KeyError: 'why'"
