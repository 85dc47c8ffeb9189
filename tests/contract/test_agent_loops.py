"""veRL's own tool agent loop, with its client and a balancer, around a server whose
answers a test chooses.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl")
import ray
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from own_history import OwnHistory
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopManager,
    AgentLoopWorker,
    DictConfigWrap,
    ToolListWrap,
)
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from das_adapter.core.identity import prompt_identity
from das_adapter.protocol.label import Label
from das_adapter.verl import identity
from das_adapter.verl.router import DasLoadBalancer

ROOT = Path(__file__).resolve().parents[2]
ANSWERS = [[30, 31, 32], [27, 28], [33, 34]]
"""What the policy says, turn by turn; the first two call the tool."""


@ToolParser.register("always")
class AlwaysCalls(ToolParser):
    """Every answer is a tool call: the tiny policy can't write one."""

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Any = None
    ) -> tuple[str, list[FunctionCall]]:
        return self.tokenizer.decode(responses_ids), [
            FunctionCall(name="look_up", arguments="{}")
        ]


class LookUp(BaseTool):
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **_: Any
    ) -> tuple[ToolResponse, float, dict]:
        return ToolResponse(text="12345"), 0.0, {}


class Server:
    """The part of veRL's vLLM server that clients call."""

    def __init__(self) -> None:
        self.requests: list[tuple[list[int], dict[str, int]]] = []

    def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        answer = ANSWERS[len(self.requests) % len(ANSWERS)]
        self.requests.append((prompt_ids, sampling_params["extra_args"]))
        return TokenOutput(token_ids=answer, stop_reason="completed")

    def asked(self) -> list[tuple[list[int], dict[str, int]]]:
        return self.requests


@pytest.fixture(scope="module")
def samples() -> Iterator[list[tuple[Any, list[tuple[list[int], Label]]]]]:
    """Two samples of a problem: what the agent loop returned, and the requests it
    made.
    """
    with initialize_config_dir(str(ROOT / "examples/verl"), version_base=None):
        multi_turn = {
            "format": "always",
            "max_assistant_turns": 3,
            "max_parallel_calls": 1,
        }
        overrides = [
            f"actor_rollout_ref.rollout.multi_turn.{key}={value}"
            for key, value in multi_turn.items()
        ]
        config = compose("grpo_tiny_math_cpu", overrides=overrides)
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    # Ray's workers can't import a test
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    tokenizer = hf_tokenizer(str(ROOT / "examples/tiny_math/policy"))
    schema = {
        "type": "function",
        "function": {"name": "look_up", "description": "a number"},
    }
    tools = ToolListWrap([LookUp({}, OpenAIFunctionToolSchema(**schema))])

    server = ray.remote(Server).remote()
    client = LLMServerClient(
        config, ray.remote(DasLoadBalancer).remote({"replica": server})
    )

    async def sample(number: int) -> Any:
        data = DictConfigWrap(config.data)
        loop = ToolAgentLoop(
            DictConfigWrap(config),
            client,
            tokenizer,
            None,
            RLHFDataset,
            data,
            tools=tools,
        )

        async def run(
            worker: Any,
            sampling_params: dict[str, Any],
            trajectory: dict[str, Any],
            **kwargs: Any,
        ) -> Any:
            return await loop.run(sampling_params, **kwargs)

        trajectory = {
            "step": 1,
            "sample_index": 5,
            "rollout_n": number,
            "validate": False,
        }
        prompt = [{"role": "user", "content": "17 a=5+3"}]
        output = await identity.follow_samples.replacement(run)(
            None, {}, trajectory, session_id=number, raw_prompt=prompt
        )
        asked = (await server.asked.remote())[number * len(ANSWERS) :]
        return output, [(ids, Label.of(extra)) for ids, extra in asked]

    yield [asyncio.run(sample(number)) for number in range(2)]
    ray.shutdown()


def test_the_hooks_are_in() -> None:
    assert AgentLoopManagerTQ.generate_sequences.__das_patch__ == "name_batches"
    assert AgentLoopManager.generate_sequences.__das_patch__ == "name_awaited_batches"
    assert hasattr(AgentLoopWorker._run_agent_loop, "__wrapped__")
    assert hasattr(LLMServerClient.generate, "__wrapped__")


def test_a_trainer_that_awaits_a_batch_gets_what_can_be_awaited() -> None:
    """As the pipeline that is one step off."""
    manager = object.__new__(AgentLoopManager)
    manager.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {}}})

    async def asked() -> Any:
        return manager.generate_sequences(None)

    called = asyncio.run(asked())
    assert inspect.iscoroutine(called)
    called.close()


def test_a_batch_is_awaited_where_another_plug_in_took_the_place_of_the_method() -> (
    None
):
    async def stock(self: Any, prompts: Any) -> Any:
        return prompts

    manager = object.__new__(AgentLoopManager)
    manager.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {}}})
    assert (
        identity.name_awaited_batches.replacement(stock)(manager, "a batch")
        == "a batch"
    )


def test_every_turn_is_of_the_first_turns_problem(samples: Any) -> None:
    (_, mine), (_, siblings) = samples
    assert len(mine) == len(siblings) == len(ANSWERS)
    problems = {label.problem for _, label in (*mine, *siblings)}
    assert problems == {prompt_identity(mine[0][0])}
    assert (
        len({label.seed for _, label in mine})
        == 1
        != len({mine[0][1].seed, siblings[0][1].seed})
    )


def test_turns_together_are_the_conversation_each_token_once(samples: Any) -> None:
    """What the server hands to the history: the answers, and in front of each what the
    tool said before.
    """
    output, requests = samples[0]
    texts = [
        [*prompt[label.start :], *said]
        for (prompt, label), said in zip(requests, ANSWERS, strict=True)
    ]
    assert [token for text in texts for token in text] == output.response_ids
    assert texts[0] == ANSWERS[0]
    assert len(texts[1]) > len(ANSWERS[1])  # the tool's words are history


def test_the_tools_words_are_drafted_from_but_are_no_output(samples: Any) -> None:
    (output, requests), (_, siblings) = samples
    mask = np.array(output.response_mask)
    assert np.array(output.response_ids)[mask == 1].tolist() == [
        token for said in ANSWERS for token in said
    ]

    index = OwnHistory()
    for (prompt, label), said in zip(requests, ANSWERS, strict=True):
        index.add(label.problem, [*prompt[label.start :], *said], 0)
    index.seal()
    prompt, label = siblings[1]  # of the other sample, with the tool's words at its end
    start = label.start
    handle = index.open(label.problem, prompt[:start], prefix=prompt[start:])
    assert index.draft([handle], [4], 0.0)[0][0].tolist()[:2] == ANSWERS[1]
