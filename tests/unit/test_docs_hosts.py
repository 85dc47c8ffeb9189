"""What the pages tell users of other trainers to write does in vLLM what the pages
say.
"""

from __future__ import annotations

import ast
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

pytest.importorskip("vllm")

from documented import ROOT, blocks
from vllm import SamplingParams
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from das_adapter.config import parse
from das_adapter.engine.settings import history_name, prepare_standalone
from das_adapter.protocol.engine_args import CONFIG_VARIABLE, RUN_VARIABLE, SETTINGS_KEY
from das_adapter.protocol.label import Label

HOSTS = ROOT / "docs/hosts.md"


def evaluation() -> list[dict[str, Any]]:
    """Return what TRL's `generation_kwargs` should be where rollouts stay out of the
    history.
    """
    found = re.findall(
        r"`generation_kwargs=(\{.*?\})`", (ROOT / "docs/trl.md").read_text()
    )
    return [ast.literal_eval(given) for given in found]


def test_an_evaluation_of_trl_stays_out_of_the_history_in_each_mode() -> None:
    """TRL adds its `generation_kwargs` to what it sends, `SamplingParams` in colocate
    mode: an unknown key fails.
    """
    server, colocate = evaluation()
    request = CompletionRequest(model="policy", prompt="1 + 1", **server)
    for params in (
        request.to_sampling_params(16, {}),
        SamplingParams(n=1, max_tokens=16, **colocate),
    ):
        assert not Label.of(params.extra_args).record


def histories(additional: dict[str, Any]) -> int:
    """Return how many histories two engines with these arguments have."""
    engines = [
        SimpleNamespace(
            additional_config=additional, speculative_config=None, instance_id=name
        )
        for name in ("one", "other")
    ]
    for engine in engines:
        block = parse(additional[SETTINGS_KEY])
        assert block is not None
        prepare_standalone(engine, block)
    return len(set(map(history_name, engines)))


def test_the_engines_of_a_node_share_one_history_as_the_page_starts_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(RUN_VARIABLE, raising=False)
    block = {SETTINGS_KEY: {"drafter": "history"}}
    assert histories(block) == 2
    (skyrl,) = (
        yaml.safe_load(text)["generator"]["inference_engine"]
        for _, text in blocks(HOSTS, "yaml")
    )
    assert histories(skyrl["engine_init_kwargs"]["additional_config"]) == 1
    (openrlhf,) = re.findall(r"--runtime-env-json '(.*?)'", HOSTS.read_text())
    environment = json.loads(openrlhf)["env_vars"]
    assert environment.keys() == {CONFIG_VARIABLE, RUN_VARIABLE}
    monkeypatch.setenv(RUN_VARIABLE, environment[RUN_VARIABLE])
    assert histories(block) == 1
