"""The plug-in in an engine that is given only the `das:` block."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from das_adapter import compat
from das_adapter.errors import ConfigError

POLICY = Path(__file__).resolve().parents[2] / "examples/tiny_math/policy"

KEYED = {"drafter": "none", "verify": {"noise": "keyed"}}


def engine_config(**arguments: Any) -> Any:
    load_general_plugins()
    settings = {
        "model": str(POLICY),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
    }
    return EngineArgs(**{**settings, **arguments}).create_engine_config()


def test_the_block_alone_chooses_the_drafter() -> None:
    config = engine_config(
        additional_config={"das": {"drafter": "history", "max_draft_tokens": 5}}
    )
    assert (
        config.speculative_config.method,
        config.speculative_config.num_speculative_tokens,
    ) == ("custom_class", 5)
    assert config.model_config.max_model_len == 512
    assert engine_config().speculative_config is None


def test_a_drafter_that_somebody_chose_is_refused_beside_ours_and_stays_beside_none() -> (
    None
):
    own = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    with pytest.raises(
        ConfigError,
        match=r"das\.drafter='history' and speculative_config both choose a drafter",
    ):
        engine_config(
            additional_config={"das": {"drafter": "history"}}, speculative_config=own
        )
    config = engine_config(additional_config={"das": KEYED}, speculative_config=own)
    assert config.speculative_config.method == "ngram"


def test_a_drafters_checkpoint_as_the_model_is_refused_beside_another_drafter(
    tmp_path: Path,
) -> None:
    """vLLM makes its verifier the model, and itself the drafter, where it is in the
    speculators format.
    """
    policy = json.loads((POLICY / "config.json").read_text())
    sizes = {
        key: value
        for key, value in policy.items()
        if key not in ("architectures", "layer_types")
    }
    ways = {
        "proposal_methods": [{"speculative_tokens": 3}],
        "verifier": {"name_or_path": str(POLICY)},
    }
    head = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": policy["vocab_size"],
        "speculators_config": ways,
    }
    head["transformer_layer_config"] = {
        **sizes,
        "model_type": "llama",
        "num_hidden_layers": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(head))

    # vLLM itself reads options with hyphens from 0.26 on.
    with_hyphens = compat.numbers(compat.version("vllm") or "") >= (0, 26)
    name = "draft-sample-method" if with_hyphens else "draft_sample_method"
    options = {name: "greedy"}
    eagle3, other = (
        {"drafter": "eagle3", "draft": {"model": m, "options": options}}
        for m in (str(tmp_path), "other")
    )
    for block in ({"drafter": "history"}, other):
        found = (
            f"das.drafter={block['drafter']!r} and the model, {str(tmp_path)!r}, a"
            " drafter's checkpoint"
        )
        allowed = f"its verifier, {str(POLICY)!r}, or das.drafter to 'none'"
        with pytest.raises(
            ConfigError, match=f"{re.escape(found)}.*{re.escape(allowed)}"
        ):
            engine_config(model=str(tmp_path), additional_config={"das": block})
    for model, block in (
        (POLICY, eagle3),
        (POLICY, eagle3 | {"verify": {"noise": "stock"}}),
        (tmp_path, KEYED),
    ):
        made = engine_config(model=str(model), additional_config={"das": block})
        assert (made.model_config.model, made.speculative_config.method) == (
            str(POLICY),
            "eagle3",
        )


def test_arguments_may_be_used_again() -> None:
    load_general_plugins()
    args = EngineArgs(
        str(POLICY), dtype="float32", max_model_len=512, additional_config={"das": {}}
    )
    assert [
        args.create_engine_config().speculative_config.method for _ in range(2)
    ] == ["custom_class"] * 2


def test_drafts_fit_beside_lora_adapters_or_the_key_is_named() -> None:
    def adapted(block: dict[str, Any], step: int = 2048) -> tuple[int, Any]:
        sizes = {"max_num_seqs": 256, "max_num_batched_tokens": step}
        config = engine_config(
            enable_lora=True, max_lora_rank=8, additional_config={"das": block}, **sizes
        )
        return (
            config.speculative_config.num_speculative_tokens,
            config.additional_config["das"],
        )

    assert adapted({"budget": "uniform"}) == (
        7,
        {"budget": "uniform", "max_draft_tokens": 7},
    )
    assert adapted({"max_draft_tokens": 7}) == (7, {"max_draft_tokens": 7})
    for block, step, found, most in (
        ({"max_draft_tokens": 8}, 2048, 8, 7),
        ({}, 511, 32, 0),
    ):
        with pytest.raises(
            ConfigError,
            match=rf"das\.max_draft_tokens: found {found}, allowed .* most {most}",
        ):
            adapted(block, step)


def test_a_wrong_block_stops_the_engine() -> None:
    with pytest.raises(ConfigError, match="did you mean 'history'"):
        engine_config(additional_config={"das": {"histroy": {}}})


def test_drafts_found_on_the_host_need_synchronous_scheduling() -> None:
    das = {"das": {"drafter": "history"}}
    with pytest.raises(
        ConfigError, match="found async_scheduling=True, allowed: None or False"
    ):
        engine_config(additional_config=das, async_scheduling=True)
    assert not engine_config(additional_config=das).scheduler_config.async_scheduling


def test_a_drafter_with_weights_gets_them_and_the_engine_stays_as_long() -> None:
    das = {
        "drafter": "draft_model",
        "max_draft_tokens": 4,
        "draft": {"model": str(POLICY)},
    }
    config = engine_config(additional_config={"das": das}, load_format="dummy")
    assert config.model_config.max_model_len == 512
    assert config.load_config.load_format == "auto"


def test_the_environment_may_hold_or_name_the_block(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "das.yaml"
    for text, given in (
        ('{"drafter": "history", "max_draft_tokens": 6}', None),
        (str(file), "das:\n  max_draft_tokens: 6\n"),
        (str(file), "max_draft_tokens: 6\n"),
    ):
        file.write_text(given or "")
        monkeypatch.setenv("DAS_CONFIG", text)
        assert engine_config().speculative_config.num_speculative_tokens == 6
    own = {"das": {"max_draft_tokens": 7}}
    assert (
        engine_config(additional_config=own).speculative_config.num_speculative_tokens
        == 7
    )
    for off in ("", "{}", '{"drafter": "none"}'):
        monkeypatch.setenv("DAS_CONFIG", off)
        assert (engine_config().speculative_config is None) == (off != "{}")


@pytest.mark.parametrize("pools", [{"runner": "pooling"}, {"convert": "embed"}])
def test_an_engine_that_writes_nothing_gets_no_block_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, pools: dict[str, str]
) -> None:
    monkeypatch.setenv("DAS_CONFIG", "{}")
    config = engine_config(**pools)
    assert (config.speculative_config, config.additional_config) == (None, {})


@pytest.mark.parametrize(
    "extension",
    [
        "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension",
        "nemo_rl.models.generation.vllm.vllm_backend.VllmInternalWorkerExtension",
    ],
)
def test_an_engine_of_a_host_gets_no_block_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, extension: str
) -> None:
    monkeypatch.setenv("DAS_CONFIG", "{}")
    config = engine_config(worker_extension_cls=extension)
    assert (config.speculative_config, config.additional_config) == (None, {})
    assert (
        engine_config(worker_extension_cls="another.Extension").speculative_config
        is not None
    )


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "DAS_CONFIG",
            "/nowhere/das.yaml",
            "DAS_CONFIG: found '/nowhere/das.yaml', allowed: a das: block",
        ),
        ("DAS_CONFIG", '{"das": null}', "found an empty block"),
        (
            "DAS_CONFIG",
            '{"history": {"load": "/tmp"}}',
            "das.history.load: found '/tmp', allowed: null, because",
        ),
        (
            "VLLM_USE_V2_MODEL_RUNNER",
            "1",
            "VLLM_USE_V2_MODEL_RUNNER: found '1', allowed: '0', because",
        ),
    ],
)
def test_what_an_engine_without_a_host_cannot_do_stops_it(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv("DAS_CONFIG", "{}")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=re.escape(message)):
        engine_config()


def not_told(self: Any, request: Any) -> bool:
    """`should_advance` of vLLM 0.24 to 0.26."""
    return True


def told(self: Any, request: Any, new_token_ids: Any = None) -> bool:
    """`should_advance` of vLLM 0.27 to 0.29."""
    return True


PARSER = {"reasoning_parser": "qwen3"}
IN_REASONING = {
    "structured_outputs_config": {**PARSER, "enable_in_reasoning": True},
}


@pytest.mark.parametrize(
    ("should_advance", "arguments", "refused"),
    [
        (not_told, PARSER, True),
        (not_told, {}, False),
        (not_told, IN_REASONING, False),
        (told, PARSER, False),
    ],
)
def test_structured_outputs_behind_reasoning_are_refused_where_vllm_does_not_mask_all_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
    should_advance: Any,
    arguments: dict[str, Any],
    refused: bool,
) -> None:
    monkeypatch.setattr(
        "vllm.v1.structured_output.StructuredOutputManager.should_advance",
        should_advance,
        raising=False,
    )
    config = engine_config(additional_config={"das": {}}, **arguments)
    checked = config.model_config, config.speculative_config, None, None
    SamplingParams().verify(*checked)
    found = (
        pytest.raises(VLLMValidationError, match="das: found structured_outputs")
        if refused
        else nullcontext()
    )
    with found:
        SamplingParams(
            structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
        ).verify(*checked)


@pytest.mark.parametrize("scope", ["trusted", "global"])
def test_clients_that_trust_each_other_share_a_history(
    monkeypatch: pytest.MonkeyPatch, scope: str
) -> None:
    monkeypatch.setenv("DAS_CONFIG", json.dumps({"history": {"scope": scope}}))
    assert engine_config().speculative_config.method == "custom_class"


@pytest.mark.parametrize("dev_mode", ["0", "1"])
def test_a_server_has_no_route_of_ours(
    monkeypatch: pytest.MonkeyPatch, dev_mode: str
) -> None:
    """With a block, hosted or not: what can be asked over HTTP is what vLLM's own
    server can be asked.
    """
    from vllm.entrypoints.openai import api_server
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # since 0.29
    launchers = (
        "launchers"
        if importlib.util.find_spec("vllm.entrypoints.launchers")
        else "openai"
    )
    cli_args = importlib.import_module(f"vllm.entrypoints.{launchers}.cli_args")

    monkeypatch.setenv("DAS_CONFIG", "{}")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", dev_mode)
    load_general_plugins()
    args = cli_args.make_arg_parser(FlexibleArgumentParser()).parse_args([])
    routes = [
        route
        for route in api_server.build_app(args, ("generate",)).routes
        if hasattr(route, "endpoint")
    ]
    answers = {route.path: route.endpoint.__code__.co_filename for route in routes}
    assert "/v1/completions" in answers
    assert ("/collective_rpc" in answers) == (dev_mode == "1")
    assert not [
        path for path, file in answers.items() if "das" in path or "das_adapter" in file
    ]


def test_the_model_runner_is_chosen_where_nobody_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DAS_CONFIG", "{}")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    assert not engine_config().use_v2_model_runner
    # for the processes of this engine
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    monkeypatch.delenv("DAS_CONFIG")
    engine_config()
    # the next one chooses for itself
    assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    for additional in ({"das": {}}, {}):
        engine_config(additional_config=additional)
        assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"


def test_what_a_gpu_alone_imports_is_in_every_build(vllm_env: dict[str, str]) -> None:
    """No engine on a CPU imports the kernels of the policy copy."""
    command = [sys.executable, "-c", "import das_adapter.engine.quantised_gpu"]
    subprocess.run(command, check=True, env={**os.environ, **vllm_env})
