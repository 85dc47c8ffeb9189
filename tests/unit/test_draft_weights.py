"""What das-adapter does with a drafter that vLLM has loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from das_adapter.config import parse
from das_adapter.engine.draft_weights import DraftWeights


class OtherNames(torch.nn.Module):
    """As vLLM's GPT-2, EXAONE and Falcon, a model whose layers lie in `transformer`, not in `model`."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = torch.nn.Linear(2, 2, bias=False)

    def load_weights(self, weights: Any) -> set[str]:
        return {name for name, weight in weights if self.get_parameter(name).data.copy_(weight) is not None}


def test_a_draft_model_of_any_family_takes_the_trainers_weights() -> None:
    drafter = OtherNames()
    config = parse({"drafter": "draft_model", "draft": {"model": "a small one", "weights": "trainer"}})
    weights = DraftWeights(SimpleNamespace(speculator=SimpleNamespace(model=drafter)), config)
    weights.take_loaded()
    assert "brought no weight" in str(weights.refresh())
    drafter.load_weights([("transformer.weight", torch.ones(2, 2))])
    assert weights.refresh() is None and drafter.transformer.weight.sum() == 4
