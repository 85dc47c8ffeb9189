"""What siblings are worth, as an engine's requests show it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from das_adapter.core.siblings import NO_SIBLINGS, PRIOR_REQUESTS, Moments, Siblings, Worth


def test_a_group_is_counted_by_the_siblings_that_each_sample_had() -> None:
    siblings, worth = Siblings(), Worth()
    begun = [siblings.begin(7) for _ in range(3)]
    for finished in begun:  # all began together
        siblings.end(7, finished, known=False, tokens=20, forwards=10)
    late = siblings.begin(7)
    siblings.end(7, late, known=False, tokens=40, forwards=10)
    assert (begun, late) == ([0, 0, 0], 3)
    together, after = worth.doublings(2, 0, False), worth.doublings(0, 3, False)
    seen = siblings.take()
    assert seen.requests == 4
    assert seen.x == pytest.approx(3 * together + after)
    assert seen.xy == pytest.approx(3 * together * 2 + after * 4)
    assert siblings.take() == Moments()


def test_a_weight_sync_forgets_finished_siblings_and_keeps_those_that_grow() -> None:
    siblings = Siblings()
    first, second = siblings.begin(7), siblings.begin(7)
    siblings.end(7, first, known=False, tokens=1, forwards=1)
    siblings.clear()
    assert siblings.begin(7) == 0
    siblings.take()
    siblings.end(7, second, known=False, tokens=1, forwards=1)  # beside the one that began last
    assert siblings.take().x == pytest.approx(Worth().doublings(1, 0, False))


def test_a_request_that_never_decoded_says_nothing() -> None:
    siblings = Siblings()
    siblings.end(7, siblings.begin(7), known=True, tokens=0, forwards=0)
    assert siblings.take() == Moments()


def test_the_worth_of_siblings_is_that_of_the_requests_once_there_are_many() -> None:
    rng = np.random.default_rng(0)
    seen, true = Moments(), Worth(alone=1.2, doubling=0.9)
    for _ in range(100 * PRIOR_REQUESTS):
        growing, finished, known = rng.integers(8), rng.integers(4), bool(rng.integers(2))
        tokens = true.tokens(growing, finished, known) * rng.lognormal(0, 0.2) / math.exp(0.02)
        seen += Moments.of(true.doublings(growing, finished, known), tokens)
    found = Worth().fitted(seen)
    assert found.alone == pytest.approx(true.alone, abs=0.1)
    assert found.doubling == pytest.approx(true.doubling, abs=0.03)
    assert Worth().fitted(Moments()).doubling == pytest.approx(Worth().doubling)


def test_requests_that_all_have_as_many_siblings_tell_how_much_all_of_them_accept() -> None:
    found = Worth().fitted(Moments.of(1.26, 1.31, 1000))
    assert found.tokens(7) == pytest.approx(1.31, abs=0.02)
    assert 1.0 < found.alone < found.tokens(3) < 1.31


def test_siblings_that_bring_nothing_are_worth_nothing() -> None:
    seen = Moments.of(0.0, 2.0, 1000) + Moments.of(3.0, 1.5, 1000)
    assert Worth().fitted(seen).doubling == 0


def test_siblings_that_are_not_to_count_stay_so() -> None:
    assert NO_SIBLINGS.fitted(Moments.of(0.0, 1.0, 1000) + Moments.of(3.0, 9.0, 1000)) == NO_SIBLINGS


def test_old_requests_fade() -> None:
    old = Moments.of(3.0, 1.0, 1000)
    assert Worth().fitted(old.faded(0.01)).doubling > Worth().fitted(old).doubling
