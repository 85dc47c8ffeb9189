"""The device index of vLLM's V2 runner: against its plain reference, against the host's
index.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import device_reference
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from own_history import OwnHistory

pytest.importorskip("triton")
import torch

from das_adapter.engine.v2.device_index import DeviceIndex

HERE = Path(__file__).parent
VOCABULARY = 12
SLOTS = 6
STEPS = 6
POEM = 90


@pytest.mark.parametrize(
    "which", ["not long", pytest.param("long", marks=pytest.mark.long)]
)
def test_kernels_equal_their_reference_in_the_interpreter(
    newest_env: dict[str, str], which: str
) -> None:
    import v2_cpu

    interpreted = [
        str(HERE / "interpreted_kernels.py"),
        str(HERE / "interpreted_recurrent.py"),
    ]
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            which,
            *interpreted,
        ],
        env={**os.environ, **newest_env, **v2_cpu.ENV},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout and "skipped" not in run.stdout


@mock.patch.object(DeviceIndex, "_launch", device_reference.launch)
def test_the_device_drafts_as_the_hosts_index_does() -> None:
    """On texts that come back with mistakes; the rules differ at the end of a text and
    in which live places count.
    """
    rng = np.random.default_rng(0)
    poems = [rng.integers(0, VOCABULARY, POEM) for _ in range(2)]

    def variation(problem: int) -> np.ndarray:
        text = poems[problem].copy()
        wrong = rng.random(POEM) < 0.1
        text[wrong] = rng.integers(0, VOCABULARY, wrong.sum())
        return text.astype(np.int32)

    host = OwnHistory()
    for version in range(3):
        for problem in (0, 0, 1, 1):
            host.add(problem, variation(problem), version)
        host.seal()
    texts = torch.zeros(SLOTS, 128, dtype=torch.int32)
    total = torch.zeros(SLOTS, dtype=torch.int32)
    device = DeviceIndex(texts, STEPS, 2**14, 0.02, VOCABULARY)
    prompts = [rng.integers(0, VOCABULARY, 10).astype(np.int32) for _ in range(2)]
    device.open([(slot, slot % 2, 10) for slot in range(SLOTS)])
    device.arena.copy_sealed(host)
    handles = [host.open(slot % 2, prompts[slot % 2]) for slot in range(SLOTS)]
    for slot in range(SLOTS):
        texts[slot, :10] = torch.from_numpy(prompts[slot % 2])
    answers = [variation(slot % 2) for slot in range(SLOTS)]
    same = 0
    accepted = np.zeros(2, dtype=np.int64)
    rounds = 0
    apart = []
    for end in range(1, POEM - STEPS, 2):
        for slot in range(SLOTS):
            texts[slot, 10 : 10 + end] = torch.from_numpy(answers[slot][:end])
            host.extend(handles[slot], answers[slot][max(0, end - 2) : end])
        total[:] = 10 + end
        drafts = device.draft(
            torch.arange(SLOTS), torch.ones(SLOTS, dtype=torch.int32), total
        )
        theirs, chances = host.draft(handles, [STEPS] * SLOTS, 0.02)
        for slot in range(SLOTS):
            count = int(device.real[slot])
            mine = drafts[slot, :count].numpy()
            rest = answers[slot][end:]
            for which, draft in enumerate((mine, theirs[slot])):
                accepted[which] += np.cumprod(draft == rest[: len(draft)]).sum()
            if np.array_equal(mine, theirs[slot]):
                same += 1
                expected = np.cumprod(device.confidence[slot, :count].numpy())
                apart += np.abs(expected - chances[slot]).tolist()
            rounds += 1
    assert same > 0.95 * rounds
    assert np.mean(apart) < 0.01
    assert accepted[0] > 0.97 * accepted[1] > 300


@mock.patch.object(DeviceIndex, "_launch", device_reference.launch)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    mistakes=st.sampled_from([0.0, 0.05, 0.2]),
    versions=st.integers(1, 4),
)
def test_from_sealed_text_the_device_drafts_what_the_hosts_index_does(
    seed: int, mistakes: float, versions: int
) -> None:
    """Token by token and chance by chance: no token comes back within a text, so that
    none is drafted from live.
    """
    rng = np.random.default_rng(seed)
    words = rng.permutation(4000).astype(np.int32)
    strangers = itertools.count(4000)
    poem = words[: rng.integers(20, 60)]

    def variation() -> np.ndarray:
        text = poem[rng.integers(0, 5) :].copy()
        for place in np.flatnonzero(rng.random(len(text)) < mistakes):
            text[place] = next(strangers)
        return text

    host = OwnHistory()
    for version in range(versions):
        for _ in range(rng.integers(1, 4)):
            host.add(7, variation(), version)
        host.seal()
    prompt = words[-10:]
    answer = variation()
    texts = torch.zeros(1, 128, dtype=torch.int32)
    total = torch.zeros(1, dtype=torch.int32)
    device = DeviceIndex(texts, STEPS, 2**14, 0.02, 5000)
    device.open([(0, 7, 10)])
    device.arena.copy_sealed(host)
    handle = host.open(7, prompt)
    written = 0
    drafted = 0
    texts[0, :10] = torch.from_numpy(prompt)
    while written < len(answer) - STEPS:
        new = answer[written : written + rng.integers(1, 4)]
        texts[0, 10 + written : 10 + written + len(new)] = torch.from_numpy(new)
        written += len(new)
        total[0] = 10 + written
        host.extend(handle, new)
        mine = device.draft(torch.arange(1), torch.ones(1, dtype=torch.int32), total)[
            0, : int(device.real[0])
        ]
        (theirs,), (chances,) = host.draft([handle], [STEPS], 0.02)
        np.testing.assert_array_equal(mine.numpy(), theirs)
        np.testing.assert_allclose(
            np.cumprod(device.confidence[0, : len(mine)].numpy()), chances, rtol=1e-5
        )
        drafted += len(mine)
    assert drafted > 0


@mock.patch.object(DeviceIndex, "_launch", device_reference.launch)
def test_the_device_drafts_what_was_written_ahead() -> None:
    rng = np.random.default_rng(0)
    written = [rng.integers(0, VOCABULARY, POEM).astype(np.int32) for _ in range(2)]
    texts = torch.zeros(2, 128, dtype=torch.int32)
    total = torch.full((2,), 14, dtype=torch.int32)
    device = DeviceIndex(texts, STEPS, 2**14, 0.02, VOCABULARY)
    device.open([(0, 7, 10), (1, 7, 10)])
    for slot, text in enumerate(written):
        device.add(7, text)
        texts[slot, 10:14] = torch.from_numpy(text[:4])
    drafts = device.draft(torch.arange(2), torch.ones(2, dtype=torch.int32), total)
    for slot, text in enumerate(written):
        count = int(device.real[slot])
        assert count > 2
        assert drafts[slot, :count].tolist() == text[4 : 4 + count].tolist()
