"""Each switch of the ablation finds the part of the policy that it switches off."""

from __future__ import annotations

import ablation
import pytest

from das_adapter.config import DasConfig
from das_adapter.core.policy import DraftPolicy


@pytest.mark.parametrize("arm", ablation.SWITCHES)
def test_a_switch_finds_what_it_switches_off(arm: str) -> None:
    policy = DraftPolicy(DasConfig(), 100)
    with ablation.numbers_kept():
        ablation.SWITCHES[arm](policy)
    assert arm in ablation.ARMS
