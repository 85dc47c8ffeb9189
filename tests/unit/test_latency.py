"""Step-time models: what the fit recovers, what it tolerates, and the roofline against its published fits."""

from __future__ import annotations

import numpy as np
import pytest

from das_adapter.core.latency import HARDWARE, Hardware, Roofline, StepModel, StepTimes, fit

# Milliseconds of a decode step of a 0.4 B bfloat16 model on two CPU cores: batch size, then by drafts per request.
DRAFTS = (0, 1, 3, 7, 15, 31)
MEASURED = {
    1: (48.4, 47.9, 49.7, 51.5, 56.5, 63.9),
    4: (48.0, 52.0, 52.1, 74.3, 77.5, 113.9),
    16: (60.7, 72.2, 80.5, 119.6, 171.0, 339.1),
}


def measured() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    requests = np.repeat(list(MEASURED), len(DRAFTS)).astype(float)
    drafts = np.tile(DRAFTS, len(MEASURED))
    return requests, drafts, np.array([t for row in MEASURED.values() for t in row]) / 1e3


def test_a_line_is_recovered_exactly() -> None:
    n = np.array([1.0, 4, 16, 64, 128])
    model = fit(n, n, np.zeros(5, dtype=bool), 0.02 + 0.0003 * n)
    assert model.base == pytest.approx(0.02, rel=1e-6)
    assert model.token == pytest.approx(0.0003, rel=1e-6)
    assert model.bend == model.request == model.draft == 0.0


def test_a_bent_curve_with_a_price_for_drafting_is_recovered() -> None:
    truth = StepModel(base=0.01, token=0.0, bend=0.0004, knee=32, draft=0.002)
    n = np.array([1, 2, 8, 16, 32, 64, 128, 256] * 2, dtype=float)
    drafted = np.repeat([False, True], 8)
    requests = np.where(drafted, np.maximum(1, n // 8), n)
    found = fit(n, requests, drafted, truth.seconds(n, requests, drafted))
    assert found.seconds(n, requests, drafted) == pytest.approx(truth.seconds(n, requests, drafted), rel=1e-4)
    assert found.knee == 32
    assert found.slope(64) == pytest.approx(0.0004, rel=1e-3)
    assert found.slope(8) == pytest.approx(0.0, abs=1e-8)


def test_measured_steps_are_fitted_better_than_the_papers_line() -> None:
    requests, drafts, seconds = measured()
    model = fit(requests * (drafts + 1), requests, drafts > 0, seconds)
    error = np.abs(model.seconds(requests * (drafts + 1), requests, drafts > 0) / seconds - 1)
    assert error.mean() < 0.05  # the paper reports 0.12 for its line


def test_time_never_falls_with_more_work() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        n = rng.integers(1, 200, 12).astype(float)
        model = fit(n, np.ceil(n / 3), rng.random(12) < 0.5, rng.uniform(0.01, 0.05, 12))
        grid = np.arange(1, 300)
        assert np.all(np.diff(model.seconds(grid, 4, True)) >= -1e-12)
        assert model.request >= 0
        assert model.draft >= 0


def test_pauses_and_stray_steps_do_not_move_the_online_fit() -> None:
    truth = StepModel(base=0.02, token=0.0005)
    rng = np.random.default_rng(1)
    times = StepTimes()
    for i in range(600):
        requests = int(rng.choice([1, 4, 16, 64]))
        drafted = bool(i % 2)
        tokens = requests * (5 if drafted else 1)
        pause = 3.0 if i % 13 == 0 else 0.0
        times.add(tokens, requests, drafted, truth.step(tokens, requests, drafted) * rng.uniform(0.95, 1.05) + pause)
        if i % 100 == 99:
            times.fit()
    assert times.model is not None
    assert times.model.base == pytest.approx(truth.base, rel=0.05)
    assert times.model.slope(50) == pytest.approx(truth.token, rel=0.05)
    assert 0.02 < times.take_error() < 0.15  # the pauses are missed, the rest is noise of 2.5 %
    assert times.take_error() == 0.0


def test_no_model_before_there_is_something_to_fit() -> None:
    times = StepTimes()
    assert times.fit() is None
    for _ in range(5):
        times.add(4, 4, False, 0.01)
    assert times.fit() is None  # one kind of step says nothing about a slope
    for _ in range(5):
        times.add(40, 4, True, 0.02)
    assert times.fit() is not None


# Fitted constants of EfficientRollout's code for an A100, and Hugging Face configs.
QWEN_7B = dict(hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
               intermediate_size=18944, vocab_size=152064)  # fmt: skip
LLAMA_8B = dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
                intermediate_size=14336, vocab_size=128256)  # fmt: skip
QWEN_14B = dict(hidden_size=5120, num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8,
                intermediate_size=13824, vocab_size=152064)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "tb", "fitted", "largest"),
    [
        (QWEN_7B, 1.617, (1.334, 26205, 39, 69, 152.3), (31, 43, 34, 38)),
        (LLAMA_8B, 1.566, (1.405, 25163, 74, 86.1, 214.2), (33, 47, 37, 42)),
        (QWEN_14B, 1.564, (1.271, 48070, 50, 153.9, 232.3), (32, 42, 34, 37)),
    ],
)
def test_the_roofline_switches_where_the_published_fits_do(
    config: dict[str, int], tb: float, fitted: tuple[float, ...], largest: tuple[int, ...]
) -> None:
    names = ("draft_read", "kv_bytes", "plain_us", "draft_us", "verify_us")
    roof = Roofline.of(config, Hardware(tb * 1e12, 233.5e12), **dict(zip(names, fitted, strict=True)))
    for (drafts, length), batch in zip(((5, 5.0), (5, 5.7), (7, 7.0), (11, 11.0)), largest, strict=True):
        pays = [b for b in range(1, 200) if roof.speedup(b, 2048, drafts, length, share=0.25) >= 1.05]
        assert max(pays) == batch
    assert 1.4 < roof.speedup(1, 2048, 5, 5.0, share=0.25) < 1.95


def test_the_roofline_knows_a_models_bytes_and_is_usable_before_the_first_step() -> None:
    roof = Roofline.of(QWEN_7B, HARDWARE["h100"], tensor_parallel=2)
    assert roof.weight_bytes == pytest.approx(7.6e9, rel=0.02)  # 7.6 B parameters, 2 bytes, 2 devices
    line = roof.line(context=1000)
    for batch in (1, 8):
        assert line.step(batch, batch, False) == pytest.approx(roof.verify(batch, 1000, 0), rel=0.02)
    wide = 4096
    assert line.step(wide, 16, True) == pytest.approx(roof.verify(16, 1000, wide // 16 - 1), rel=0.1)


def test_capacity_is_what_doubles_a_step() -> None:
    assert StepModel(base=0.01, token=0.0001, request=0.0002).capacity() == pytest.approx((50, 100))
    bent = StepModel(base=0.004, token=0.002, bend=-0.0018, knee=4.0)
    assert bent.capacity().tokens > 15  # what the first few tokens add says little of a batch
    assert StepModel(base=0.01, token=0.0).capacity() == (1024, 1024)
