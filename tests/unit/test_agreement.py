"""The benchmark of what was written ahead: one noise writes one text under the same
weights.
"""

from __future__ import annotations

import numpy as np
import pytest

PROMPTS = [[2, 40, 41, 3], [2, 42, 3]]


@pytest.mark.long
def test_the_same_weights_repeat_a_text_whole_with_its_noise_and_not_with_other_noise() -> (
    None
):
    import agreement
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(
        agreement.TASK / "policy", dtype="float32"
    )
    one, two, other = (
        agreement.write(policy, PROMPTS, np.array(seeds), 1.5, 24)
        for seeds in ([1, 2], [1, 2], [3, 4])
    )
    assert all(np.array_equal(a, b) for a, b in zip(one[0], two[0], strict=True))
    assert [agreement.repeated(a, b) for a, b in zip(one[0], two[0], strict=True)] == [
        len(text) for text in one[0]
    ]
    assert any(
        agreement.repeated(a, b) < len(a) for a, b in zip(one[0], other[0], strict=True)
    )
    assert 0 < one[1] == pytest.approx(two[1])
