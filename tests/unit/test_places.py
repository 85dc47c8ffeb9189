"""The place of a history is the first one that can be written to."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from das_adapter.errors import DasError
from das_adapter.protocol import spool
from das_adapter.protocol.spool import FOLDER, directory_for


class Places:
    """Two places for a history; writing to one may raise an error."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shared = root / "shared"
        self.temporary = root / "temporary"
        self.errors: dict[Path, int] = {}
        for place in (self.shared, self.temporary):
            place.mkdir()
        really = spool.write_private

        def write_private(path: Path, content: bytes) -> None:
            for place, number in self.errors.items():
                if place in path.parents:
                    raise OSError(number, os.strerror(number), str(path))
            really(path, content)

        monkeypatch.setattr(spool, "write_private", write_private)
        both = (self.shared, self.temporary)
        monkeypatch.setattr(spool, "history_roots", lambda: both)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    return Places(tmp_path, monkeypatch)


NUMBERS = [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EDQUOT, errno.EIO]


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
def test_a_place_that_can_not_be_written_to_is_passed_over(
    places: Places, number: int, caplog: Any
) -> None:
    places.errors[places.shared] = number
    made = directory_for("das-history-x", 1)
    assert made == places.temporary / "das-history-x"
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert (made / FOLDER).is_dir() and not list((made / FOLDER).iterdir())
    assert not list(places.shared.iterdir())
    assert str(places.shared) in caplog.text
    assert os.strerror(number) in caplog.text


@pytest.mark.parametrize("odd", ["gone", "a file", "taken by a file"])
def test_a_place_that_is_not_there_is_passed_over(places: Places, odd: str) -> None:
    if odd == "taken by a file":
        (places.shared / "das-history-x").write_bytes(b"")
    else:
        places.shared.rmdir()
    if odd == "a file":
        places.shared.write_bytes(b"")
    assert directory_for("das-history-x", 1).parent == places.temporary
    assert odd != "gone" or not places.shared.exists()


def test_a_history_that_is_there_is_left_only_when_it_can_not_be_written_to(
    places: Places,
) -> None:
    made = directory_for("das-history-x", 2**62)  # there is no such room
    assert made.parent == places.temporary
    assert directory_for("das-history-x", 1) == made
    places.errors[places.temporary] = errno.EROFS
    assert directory_for("das-history-x", 1).parent == places.shared


def test_no_place_is_an_error_that_names_both_and_what_to_do(places: Places) -> None:
    places.errors = {places.shared: errno.EROFS, places.temporary: errno.ENOSPC}
    with pytest.raises(DasError) as raised:
        directory_for("das-history-x", 1)
    text = str(raised.value)
    for part in (*places.errors, *map(os.strerror, places.errors.values()), "TMPDIR"):
        assert str(part) in text
