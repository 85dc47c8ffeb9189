"""`vllm serve` with `DAS_CONFIG`, driven over HTTP by a trainer that knows nothing of
das-adapter.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import requests

pytest.importorskip("vllm")
import stub_trainer
from serving import served

pytestmark = pytest.mark.hosts

# Without the controller, whose decisions depend on how long steps take.
HISTORY = {"drafter": "history", "budget": "unlimited", "speculate": "always"}


def test_a_trainer_gets_the_same_tokens_and_the_history_follows_its_updates(
    tmp_path: Path,
) -> None:
    command = [
        sys.executable,
        stub_trainer.__file__,
        "--steps",
        "2",
        "--out",
        str(tmp_path),
    ]
    subprocess.run(command, check=True)
    off, on = json.loads((tmp_path / "result.json").read_text()).values()
    tokens = [rollout["tokens"] for rollout in off["rollouts"]]
    assert [rollout["tokens"] for rollout in on["rollouts"]] == tokens
    assert tokens[0] != tokens[1]
    first, second = on["metrics"]
    written = sum(len(text) for group in tokens[0] for text in group)
    assert first["das_history_tokens"] == 0
    assert second["das_history_tokens"] >= written
    assert second["das_history_hits"] == 1.0
    assert second["das_health"] == 1.0
    assert second[stub_trainer.ACCEPTED] > first[stub_trainer.ACCEPTED]


PARSERS = {
    "reasoning": Path(__file__).parents[1] / "contract" / "hash_reasoning.py",
    "tool": Path(__file__).with_name("hash_tools.py"),
}
"""Plug-ins with parsers of the tiny policy's answers."""
TOOL = {"type": "function", "function": {"name": "answer", "parameters": {}}}


def streamed(address: str, content: str, seed: int, calls: bool) -> dict[str, str]:
    """Return the parts of a streamed answer, each put together; `calls`: whether it may
    call a tool.
    """
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 120,
        "temperature": 1.0,
        "seed": seed,
        "stream": True,
        **({"tools": [TOOL]} if calls else {}),
    }
    parts = {"reasoning": "", "content": "", "arguments": ""}
    url = f"{address}/v1/chat/completions"
    with requests.post(url, json=body, stream=True, timeout=300) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            event = line.decode().removeprefix("data: ")
            if not event or event == "[DONE]":
                continue
            for choice in json.loads(event)["choices"]:
                delta = choice["delta"]
                for call in delta.get("tool_calls", ()):
                    delta |= call["function"]
                for name in parts:
                    parts[name] += delta.get(name) or ""
    return parts


def test_parsers_stream_the_same_where_a_step_brings_several_tokens(
    tmp_path: Path,
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(stub_trainer.POLICY)
    texts = [tokenizer.decode(ids[1:-1]) for ids in stub_trainer.problems(2)]
    asked = [(text, seed, seed < 3) for text in texts for seed in range(6)]
    found = []
    accepted = []
    for block in (stub_trainer.ARMS["off"], HISTORY):
        arguments = ["serve", str(stub_trainer.POLICY), *stub_trainer.SERVER.split()]
        arguments += [stub_trainer.EXTENSION, "--enable-auto-tool-choice"]
        arguments += ["--reasoning-parser", "hash", "--tool-call-parser", "hash"]
        for kind, path in PARSERS.items():
            arguments += [f"--{kind}-parser-plugin", str(path)]
        log = tmp_path / block["drafter"]
        with served("vllm.entrypoints.cli.main", arguments, block, log) as server:
            ask = partial(streamed, server.address)
            with ThreadPoolExecutor(len(asked)) as pool:
                found.append(list(pool.map(ask, *zip(*asked, strict=True))))
            counts = stub_trainer.metrics(server.address)
            accepted.append(counts.get(stub_trainer.ACCEPTED, 0.0))
    assert found[1] == found[0]
    assert all(parts["reasoning"] for parts in found[0])
    for (*_, calls), parts in zip(asked, found[0], strict=True):
        assert not parts["content" if calls else "arguments"]
    for name in ("content", "arguments"):
        assert any(parts[name] for parts in found[0])
    assert accepted[1] > 50 and not accepted[0]


def test_a_bad_request_is_answered_with_its_key_and_no_route_is_ours(
    tmp_path: Path,
) -> None:
    bad = {
        "das_start": -5,
        "das_problem": "x",
        "das_seed": 1e300,
        "das_record": [2],
        "das_recrod": 0,
    }
    with stub_trainer.policy_served(HISTORY, tmp_path / "log") as server:
        for key, value in [*bad.items(), ("das_problem", 5), ("das_start", 0)]:
            body = {"prompt": [2, 25, 3], "max_tokens": 4, "vllm_xargs": {key: value}}
            answer = requests.post(
                f"{server.address}/v1/completions", json=body, timeout=60
            )
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith(f"{key}: ")
        assert stub_trainer.sample(
            server.address, [2, 25, 3], vllm_xargs={"das_record": 0, "das_seed": 7}
        )
        assert (
            requests.post(
                f"{server.address}/v1/das/refresh", json={}, timeout=60
            ).status_code
            == 404
        )
        paths = requests.get(f"{server.address}/openapi.json", timeout=60).json()[
            "paths"
        ]
        assert "/collective_rpc" in paths
        assert not [path for path in paths if "das" in path]
