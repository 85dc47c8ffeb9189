"""The plug-in in an engine that is given only the `das:` block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins

from das_adapter.engine import patches
from das_adapter.errors import ConfigError

POLICY = Path(__file__).resolve().parents[2] / "examples/tiny_math/policy"


def engine_config(**arguments: Any) -> Any:
    load_general_plugins()
    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512}
    return EngineArgs(str(POLICY), **{**settings, **arguments}).create_engine_config()


def test_the_block_alone_chooses_the_drafter() -> None:
    config = engine_config(additional_config={"das": {"drafter": "history", "budget": {"max_draft_tokens": 5}}})
    assert (config.speculative_config.method, config.speculative_config.num_speculative_tokens) == ("custom_class", 5)
    assert config.model_config.max_model_len == 512
    assert engine_config().speculative_config is None


def test_a_drafter_that_somebody_chose_stays() -> None:
    own = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    config = engine_config(additional_config={"das": {"drafter": "history"}}, speculative_config=own)
    assert config.speculative_config.method == "ngram"


def test_a_wrong_block_stops_the_engine() -> None:
    with pytest.raises(ConfigError, match="did you mean 'history'"):
        engine_config(additional_config={"das": {"histroy": {}}})


def test_a_drafter_with_weights_gets_them_and_room_past_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = {"method": "draft_model", "model": str(POLICY), "num_speculative_tokens": 4}
    monkeypatch.setattr(patches, "engine_args", lambda _: {"speculative_config": drafter})
    config = engine_config(additional_config={"das": {"drafter": "history"}}, load_format="dummy")
    assert config.model_config.max_model_len == 512 + 4 + 1
    assert config.load_config.load_format == "auto"
