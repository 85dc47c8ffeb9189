"""A file system that fills up costs history, and nobody next door a byte."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from das_adapter.config import HistoryConfig
from das_adapter.core.index import SuffixIndex
from das_adapter.protocol import spool
from das_adapter.protocol.messages import Trajectory
from das_adapter.protocol.spool import (
    available_bytes,
    bytes_on_disk,
    directory_for,
    put_batch,
)
from das_adapter.service.writer import Writer

MB = 2**20
PROBLEMS = 40


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 128 MiB in memory, the node's shared memory."""
    monkeypatch.setattr(spool, "SHARED_MEMORY", tmp_path)
    found = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128m", "none", tmp_path],
        capture_output=True,
        text=True,
    )
    if found.returncode:
        pytest.skip(f"tmpfs can't be mounted here: {found.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


@pytest.mark.parametrize(("beside", "others"), [(60 * MB, 0), (0, 60 * MB)])
def test_a_history_that_fills_its_file_system_is_thinned_out_and_goes_on(
    small: Path, caplog: Any, beside: int, others: int
) -> None:
    writer = Writer(
        HistoryConfig(max_bytes=2**30),
        small / "history",
        grace_s=0.1,
        object_store_bytes=beside,
    )
    (small / "others").write_bytes(bytes(others))
    index = SuffixIndex.attach(writer.directory)
    rng = np.random.default_rng(0)
    written = 0
    least = [128 * MB] * 2
    for version in range(7):
        texts = [
            rng.integers(0, 10_000, 20_000).astype(np.int32) for _ in range(PROBLEMS)
        ]
        batch = [
            Trajectory(problem, text.tobytes(), version)
            for problem, text in enumerate(texts)
        ]
        put_batch(writer.directory, "engine", batch)
        for file, arrived in writer.read_files():
            writer.keep_texts(file, arrived)
        writer.publish()
        index.refresh()  # as engines do at a weight sync
        writer.work(60.0)
        written += sum(map(len, texts))
        disk = shutil.disk_usage(small)
        left = disk.free, disk.total - beside - bytes_on_disk(writer.directory)
        least = [min(pair) for pair in zip(least, left, strict=True)]
        index.refresh()
        assert index.tokens == writer.store.tokens
        latest = index.draft([index.open(0, [], prefix=texts[0][:20])], [20], 0.0)[0][0]
        assert np.array_equal(latest, texts[0][20:40])
    assert least[0] >= 8 * MB and least[1] >= 16 * MB
    assert 0 < index.tokens < written and index.problems == PROBLEMS
    told = [
        record for record in caplog.records if "above a quarter of" in record.message
    ]
    assert 0 < len(told) < 7
    writer.store.close()


@pytest.mark.parametrize(
    ("total", "free", "size", "beside", "left", "fits"),
    [
        (64, 64, 10, 0, 56, True),  # an eighth stays free
        (64, 16, 10, 0, 8, False),
        (64, 64, 10, 40, 16, True),  # Ray's store takes its 40 when it needs them
        (64, 64, 10, 50, 6, False),
        (2**20, 2**20, 0, 0, 2**20 - 2**10, True),  # of a large one 1 GiB
    ],
)
def test_what_ray_may_still_take_is_no_room(
    monkeypatch: pytest.MonkeyPatch,
    total: int,
    free: int,
    size: int,
    beside: int,
    left: int,
    fits: bool,
) -> None:
    disk = SimpleNamespace(total=total * MB, free=free * MB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    assert available_bytes(spool.SHARED_MEMORY, beside * MB) == left * MB
    made = directory_for(f"das-history-test-{os.getpid()}", size * MB, beside * MB)
    shutil.rmtree(made)
    assert (made.parent == spool.SHARED_MEMORY) == fits


def test_rays_store_takes_room_only_where_it_lies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if tmp_path.stat().st_dev == spool.SHARED_MEMORY.stat().st_dev:
        pytest.skip("temporary files lie in shared memory here")
    sizes = {spool.SHARED_MEMORY: 64 * MB}
    monkeypatch.setattr(
        shutil,
        "disk_usage",
        lambda path: SimpleNamespace(
            **dict.fromkeys(("total", "free"), sizes.get(path, 48 * MB))
        ),
    )
    assert available_bytes(tmp_path, 60 * MB) == 42 * MB  # it lies in shared memory
    assert available_bytes(tmp_path, 65 * MB) < 0  # it is too large for that
