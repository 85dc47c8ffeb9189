"""Texts of all problems as a second source of drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_history import OwnHistory

from das_adapter.config import parse
from das_adapter.core.history import HistoryRules
from das_adapter.core.index import OTHERS, IndexFileError, SuffixIndex
from das_adapter.core.index.store import HistoryStore
from das_adapter.core.tuning import OTHERS_BYTES, OTHERS_TOKENS
from das_adapter.engine.settings import prepare_standalone

TEXT = np.arange(100, 160, dtype=np.int32)


def rules(**history: Any) -> HistoryRules:
    found = parse({"drafter": "history", "history": history})
    assert found is not None
    return HistoryRules(found.history)


def draft(index: SuffixIndex, problem: int, written: np.ndarray) -> list[int]:
    handle = index.open(problem, [], prefix=written)
    (tokens,), _ = index.draft([handle], [8], 0.0)
    index.close(handle, keep=False)
    return tokens.tolist()


def shared_tokens(index: SuffixIndex) -> int:
    tokens, _ = index.flat(OTHERS, 2**30)
    return int(np.count_nonzero(tokens >= 0))


def test_a_first_visit_drafts_what_other_problems_wrote() -> None:
    index = OwnHistory(others_tokens=1000)
    index.add(1, TEXT, 0)
    index.seal()
    assert draft(index, 2, TEXT[20:26]) == TEXT[26:34].tolist()
    assert (index.tokens, index.problems) == (len(TEXT), 1)


def test_without_them_a_first_visit_drafts_nothing() -> None:
    index = OwnHistory()
    index.add(1, TEXT, 0)
    index.seal()
    assert draft(index, 2, TEXT[20:26]) == []
    assert not index.has_others


def test_an_engine_that_wants_none_drafts_from_none_that_there_are(
    tmp_path: Path,
) -> None:
    with HistoryStore(tmp_path, others_tokens=1000) as store:
        store.add(1, TEXT, 0)
        store.seal()
        index = SuffixIndex(others=False)
        index.map(tmp_path)
        assert draft(index, 2, TEXT[20:26]) == []
        assert draft(index, 1, TEXT[20:26]) == TEXT[26:34].tolist()
        assert not index.has_others


def test_what_the_problem_itself_wrote_leads_while_it_is_right() -> None:
    index = OwnHistory(others_tokens=1000)
    own = np.concatenate([TEXT[:30], TEXT[:5]])
    for version in range(4):
        index.add(1, own, version)
        index.add(2, TEXT, version)
    index.seal()
    assert draft(index, 1, TEXT[20:30])[:5] == own[30:].tolist()
    assert draft(index, 2, TEXT[20:30]) == TEXT[30:38].tolist()


def test_rejected_tokens_of_other_problems_cost_the_problems_own_no_chance() -> None:
    index = OwnHistory(others_tokens=1000)
    index.add(1, TEXT, 0)
    index.add(2, TEXT + 500, 0)
    index.seal()

    def chances(problem: int, written: np.ndarray) -> list[float]:
        handle = index.open(problem, [], prefix=written)
        _, (found,) = index.draft([handle], [3], 0.0)
        index.close(handle, keep=False)
        return found.tolist()

    own = chances(2, TEXT[20:26] + 500)
    others = chances(3, TEXT[20:26])
    for _ in range(30):
        handle = index.open(3, [], prefix=TEXT[20:26])
        index.draft([handle], [3], 0.0)
        index.extend(handle, [7])
        index.close(handle, keep=False)
    assert chances(2, TEXT[20:26] + 500) == own
    assert chances(3, TEXT[20:26])[0] < 0.5 * others[0]


def test_of_a_version_there_is_half_of_the_room_spread_over_its_texts() -> None:
    index = OwnHistory(others_tokens=1200)
    for version in range(5):
        for problem in range(100):
            index.add(problem, TEXT + 100 * problem, version)
        index.seal()
        assert 300 < shared_tokens(index) <= 1200
    tokens, _ = index.flat(OTHERS, 2**30)
    problems = np.unique(tokens[tokens >= 0] // 100)
    assert problems.max() > 80  # not the first ones alone


def test_the_newest_stay() -> None:
    index = OwnHistory(others_tokens=1000)
    for version in range(40):
        index.add(version, TEXT + 100 * version, version)
        index.seal()
    assert draft(index, 99, TEXT[20:26] + 3900) == (TEXT[26:34] + 3900).tolist()
    assert draft(index, 99, TEXT[20:26]) == []
    assert shared_tokens(index) <= 1000


def test_a_history_that_is_loaded_brings_them_unless_the_store_keeps_none(
    tmp_path: Path,
) -> None:
    with HistoryStore(tmp_path / "one", others_tokens=1000) as one:
        one.add(1, TEXT, 0)
        one.seal()
        one.save(tmp_path / "saved")
    for others_tokens, expected in ((1000, TEXT[26:34].tolist()), (0, [])):
        folder = tmp_path / f"loaded-{others_tokens}"
        with HistoryStore(folder, others_tokens=others_tokens) as store:
            # problem 1 is at home on another node
            store.absorb(tmp_path / "saved", np.zeros(0, np.uint64))
            store.seal()
            assert draft(SuffixIndex.attach(folder), 2, TEXT[20:26]) == expected


def test_a_writer_that_is_started_again_keeps_them(tmp_path: Path) -> None:
    for version in range(2):
        with HistoryStore(tmp_path, others_tokens=1000) as store:
            store.add(version, TEXT + 100 * version, version)
            store.seal()
    index = SuffixIndex.attach(tmp_path)
    for version in range(2):
        expected = (TEXT[26:34] + 100 * version).tolist()
        assert draft(index, 9, TEXT[20:26] + 100 * version) == expected
    HistoryStore(tmp_path).close()
    with HistoryStore(tmp_path) as store:
        store.seal()
    assert draft(SuffixIndex.attach(tmp_path), 9, TEXT[20:26]) == []


def test_where_the_budget_is_small_they_go_first() -> None:
    index = OwnHistory(others_tokens=2**20)
    for problem in range(20):
        index.add(problem, TEXT + 100 * problem, 0)
    index.seal()
    assert index.has_others
    own = index.tokens
    index.shrink(int(0.7 * index.nbytes))
    assert not index.has_others
    assert index.tokens == own


def test_damage_is_found_before_they_are_searched(tmp_path: Path) -> None:
    with HistoryStore(tmp_path, others_tokens=1000) as store:
        store.add(1, TEXT, 0)
        store.seal()
        (file,) = tmp_path.glob("segments-*")
        content = bytearray(file.read_bytes())
        for place in range(len(content) - 40, len(content)):
            content[place] ^= 0xFF
        file.chmod(0o600)
        file.write_bytes(content)
        with pytest.raises(IndexFileError):
            index = SuffixIndex.attach(tmp_path)
            index.open(1, [])


@pytest.mark.parametrize(
    ("server", "scope", "others"),
    [
        (True, "problem", "off"),  # its clients need not know each other
        (True, "trusted", "auto"),
        (False, "problem", "auto"),
    ],
)
def test_clients_of_a_server_draft_from_no_others_text_unless_the_block_says_so(
    server: bool, scope: str, others: str
) -> None:
    vllm = pytest.importorskip("vllm.engine.arg_utils")
    config = parse({"drafter": "history", "history": {"scope": scope}})
    assert config is not None
    kind = vllm.AsyncEngineArgs if server else vllm.EngineArgs
    args = kind(model="policy", additional_config={"das": config.to_dict()})
    assert prepare_standalone(args, config).history.others == others
    in_engine = parse(args.additional_config["das"])
    assert in_engine is not None
    assert in_engine.history.others == others


def test_a_device_gets_them_first_and_an_eighth_of_its_room_at_most() -> None:
    torch = pytest.importorskip("torch")
    arena = pytest.importorskip("das_adapter.engine.v2.arena")
    index = OwnHistory(others_tokens=1000)
    for version in range(4):
        index.add(version, TEXT + 100 * version, version)
        index.seal()
    words = torch.zeros(2000, dtype=torch.int32)
    device = arena.Arena(words, slots=2, closed=2, members=2, beside=False)
    device.open(0, 3, at=0, begin=0)
    device.copy_sealed(index)
    texts, places, number = device.tables.others[:3].tolist()
    assert texts == 0 < places
    assert 0 < number < shared_tokens(index)  # the newest visits
    assert places + number <= 2000 // 8
    device.copy_sealed(index)
    assert device.tables.sealed_count[0] == len(TEXT)
    assert not device.lacks
    device.forget()
    assert not device.tables.others.any()


def test_the_block_says_how_many_there_are() -> None:
    assert rules().others_tokens == OTHERS_TOKENS
    assert rules(scope="trusted").others_tokens == OTHERS_TOKENS
    assert rules(max_bytes=OTHERS_BYTES * 1024).others_tokens == 1024
    for without in ({"others": "off"}, {"scope": "global"}, {"scope": "request"}):
        assert rules(**without).others_tokens == 0
    assert rules(others=False).others_tokens == 0  # as YAML reads `off`
