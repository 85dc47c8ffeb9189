"""What an engine with a drafter refuses before it starts: settings of vLLM under which
drafting would be wrong.
"""

from __future__ import annotations

import importlib.metadata
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from das_adapter.config import parse
from das_adapter.engine import recurrent
from das_adapter.engine.runner import refuse
from das_adapter.engine.settings import prepare_standalone
from das_adapter.errors import ConfigError

TORCHRUN = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "external_launcher",
}
"""Ranks that are started one by one, each with a scheduler of its own, as in TRL's
colocate mode.
"""


def engine(
    model: dict[str, bool],
    adapters: bool = False,
    device: str = "cuda",
    **parallel: Any,
) -> Any:
    """vLLM's config, as far as it is looked at."""
    traits = dict.fromkeys(
        (
            "is_hybrid",
            "is_attention_free",
            "is_multimodal_model",
            "uses_mrope",
            "is_moe",
        ),
        False,
    )
    sizes = {
        "pipeline_parallel_size": 1,
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_eplb": False,
    }
    sizes |= {"distributed_executor_backend": "mp", **parallel}
    return SimpleNamespace(
        model_config=SimpleNamespace(**{**traits, **model}),
        parallel_config=SimpleNamespace(**sizes),
        lora_config=object() if adapters else None,
        device_config=SimpleNamespace(device_type=device),
    )


@pytest.mark.parametrize("drafter", ["self", "history+self"])
def test_a_policy_copy_is_refused_beside_lora_adapters(drafter: str) -> None:
    config = parse({"drafter": drafter})
    with pytest.raises(
        ConfigError,
        match=rf"das\.drafter='{re.escape(drafter)}' does not work with LoRA adapters",
    ):
        refuse(config, engine({}, adapters=True))
    refuse(config, engine({}))


@pytest.mark.parametrize(
    ("block", "model", "parallel", "named"),
    [
        ({}, {}, {"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({}, {}, TORCHRUN, "tensor_parallel_size=2 under 'external_launcher'"),
        ({"drafter": "mtp"}, {}, TORCHRUN, "das.speculate=always does"),
        ({"drafter": "self"}, {"is_hybrid": True}, {}, "recurrent state"),
        ({"drafter": "history+self"}, {"uses_mrope": True}, {}, "M-RoPE"),
        (
            {"drafter": "self"},
            {"is_moe": True},
            {"data_parallel_size": 4},
            "experts over data_parallel_size=4",
        ),
        (
            {"drafter": "self"},
            {"is_moe": True},
            {"enable_eplb": True},
            "enable_eplb=True",
        ),
        (
            {"drafter": "self"},
            {},
            {"decode_context_parallel_size": 2},
            "decode_context_parallel_size=2",
        ),
        (
            {"drafter": "mtp"},
            {},
            {"decode_context_parallel_size": 2},
            "decode_context_parallel_size=2",
        ),
        (
            {"drafter": "self"},
            {},
            {"prefill_context_parallel_size": 2},
            "prefill_context_parallel_size=2",
        ),
        (
            {"drafter": "history"},
            {},
            {"prefill_context_parallel_size": 2},
            "prefill_context_parallel_size=2",
        ),
        (
            {"drafter": "mtp"},
            {"is_moe": True},
            {"data_parallel_size": 4},
            "das.speculate=always does",
        ),
        ({"drafter": "mtp"}, {"is_multimodal_model": True}, {}, "a multimodal policy"),
    ],
)
def test_what_a_drafter_cannot_do_is_named(
    block: dict[str, Any], model: dict[str, bool], parallel: dict[str, Any], named: str
) -> None:
    config = parse(block)
    with pytest.raises(
        ConfigError,
        match=rf"das\.drafter={config.drafter!r}.*{named}".replace("+", r"\+"),
    ):
        refuse(config, engine(model, **parallel))


def test_keyed_noise_is_refused_beside_a_watermark() -> None:
    marked = engine({})
    marked.watermark_config = object()
    keyed, stock = (parse({"verify": {"noise": noise}}) for noise in ("keyed", "stock"))
    with pytest.raises(ConfigError, match="does not work with watermark_config"):
        refuse(keyed, marked)
    refuse(stock, marked)


def test_installed_logits_processors_are_refused_where_vllm_leaves_them_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = "vllm.logits_processors"
    installed = importlib.metadata.EntryPoints(
        [importlib.metadata.EntryPoint("mine", "some.module:Mine", group)]
    )
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda **wanted: installed.select(**wanted)
    )
    drafts = parse({})
    off = parse({"drafter": "none", "verify": {"noise": "keyed"}})
    v1 = engine({})
    v2 = engine({})
    v2.use_v2_model_runner = True
    with pytest.raises(
        ConfigError,
        match=(
            r"found installed logits processors \(mine\).*allowed: das\.drafter='none'"
        ),
    ):
        refuse(drafts, v1)
    refuse(off, v1)
    refuse(drafts, v2)


def test_what_it_can_do_is_allowed() -> None:
    model = {"is_moe": True, "uses_mrope": True, "is_multimodal_model": True}
    refuse(parse({"max_draft_tokens": 4}), engine(model, data_parallel_size=4))


@pytest.mark.parametrize("trait", ["is_hybrid", "is_attention_free"])
def test_a_recurrent_policy_is_refused_where_steps_have_no_drafts(trait: str) -> None:
    drafts = parse({})
    always = parse({"drafter": "mtp", "budget": "unlimited", "speculate": "always"})
    v1 = engine({trait: True})
    v2 = engine({trait: True})
    v2.use_v2_model_runner = True
    with pytest.raises(
        ConfigError,
        match=(
            r"das\.drafter='history' does not work with a policy with recurrent"
            r" state on vLLM's V1 model runner"
        ),
    ):
        refuse(drafts, v1)
    refuse(drafts, v2)
    refuse(always, v1)
    refuse(always, v2)
    for drafter in ("mtp", "history+mtp"):
        refuse(parse({"drafter": drafter}), v2)
    for drafter in ("self", "history+self"):
        with pytest.raises(ConfigError, match="a policy with recurrent state"):
            refuse(parse({"drafter": drafter}), v2)
    with pytest.raises(
        ConfigError,
        match=r"das\.drafter='mtp': found a policy with recurrent state on a CPU",
    ):
        refuse(always, engine({trait: True}, device="cpu"))


@pytest.mark.parametrize(
    ("max_num_seqs", "said"),
    [
        (20, "has room for the recurrent states of 20 requests, without drafts of 80"),
        (21, "some wait because of the drafts; take a smaller das.max_draft_tokens"),
    ],
)
def test_an_engine_says_for_how_many_requests_states_there_is_room(
    max_num_seqs: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """160 blocks for two groups of recurrent layers and one of attention."""
    attention = SimpleNamespace(kv_cache_spec=SimpleNamespace(head_size=64))
    recurrent_group = SimpleNamespace(
        kv_cache_spec=SimpleNamespace(num_speculative_blocks=3)
    )
    cache = SimpleNamespace(
        num_blocks=160, kv_cache_groups=[recurrent_group, attention, recurrent_group]
    )
    config = recurrent_engine(num_speculative_tokens=3)
    config.scheduler_config.max_num_seqs = max_num_seqs
    caplog.set_level("INFO", logger="vllm.das_adapter")
    recurrent.tell_room(config, cache)
    assert said in caplog.text
    assert ("WARNING" in caplog.text) == (max_num_seqs > 20)
    caplog.clear()
    cache.kv_cache_groups = [attention]
    recurrent.tell_room(config, cache)
    assert not caplog.text


@pytest.mark.parametrize(
    ("rust", "parent", "refused"),
    [("1", True, True), ("1", False, False), ("0", True, False)],
)
def test_vllms_rust_front_end_is_refused(
    rust: str, parent: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the place of vLLM's API servers, whose parent starts the engines, and
    labels no request.
    """
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", rust)
    args = SimpleNamespace(
        additional_config={},
        speculative_config=None,
        _api_process_rank=-1 if parent else 0,
    )
    config = parse({"drafter": "history"})
    if refused:
        with pytest.raises(ConfigError, match="VLLM_USE_RUST_FRONTEND: found '1'"):
            prepare_standalone(args, config)
    else:
        prepare_standalone(args, config)


def recurrent_engine(**given: Any) -> Any:
    """vLLM's config of an engine with a recurrent policy."""
    found = engine({"is_hybrid": True})
    found.scheduler_config = SimpleNamespace(max_num_seqs=8)
    for name, value in given.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize(
    ("block", "fewer"),
    [
        ({}, 3),
        ({"max_draft_tokens": None}, 3),
        ({"max_draft_tokens": 7}, None),
        ({"max_draft_tokens": 1}, None),
        ({"drafter": "mtp"}, None),
    ],
)
def test_a_recurrent_policy_has_short_drafts(
    block: dict[str, Any], fewer: int | None
) -> None:
    config = parse(block)
    assert recurrent.shorter_drafts(config, recurrent_engine()) == fewer
    assert recurrent.shorter_drafts(config, engine({})) is None


def test_more_states_than_a_recurrent_policy_allows_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"das\.max_draft_tokens: found 8, allowed .* recurrent state: at most 7",
    ):
        recurrent.shorter_drafts(parse({"max_draft_tokens": 8}), recurrent_engine())


def recurrent_layer(builder: str) -> Any:
    """A recurrent layer with that builder of metadata, and two states of 1 KiB."""
    backend = SimpleNamespace(get_builder_cls=lambda: type(builder, (), {}))
    return SimpleNamespace(
        mamba_type=object(),
        get_attn_backend=lambda: backend,
        get_state_shape=lambda: ((4, 64), (2, 256)),
        get_state_dtype=lambda: (torch.float32, torch.bfloat16),
    )


def test_layers_that_go_on_from_rejected_tokens_are_refused_by_name() -> None:
    known = [recurrent_layer(name) for name in recurrent.BUILDERS]
    policy = recurrent_engine()
    layers = {"0": known[0], "1": object(), "2": known[1]}
    policy.compilation_config = SimpleNamespace(static_forward_context=layers)
    assert recurrent.recurrent_layers(policy) == known[:2]
    recurrent.refuse_layers(parse({}), known)
    with pytest.raises(
        ConfigError,
        match=r"recurrent layers \(1 of SimpleNamespace\) .* allowed: das\.drafter",
    ):
        recurrent.refuse_layers(
            parse({}), [*known, recurrent_layer("Mamba1AttentionMetadataBuilder")]
        )


def test_the_memory_of_states_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    layers = [recurrent_layer(recurrent.BUILDERS[0])] * 1024
    num_bytes = recurrent.state_bytes(layers)
    assert num_bytes == 2 * 2**20
    caplog.set_level("INFO", logger="vllm.das_adapter")
    recurrent.tell_memory(recurrent_engine(num_speculative_tokens=3), num_bytes)
    assert (
        "recurrent state: 8.0 MiB a request on each rank, of which 6.0 MiB are for"
        " max_draft_tokens=3; 0.1 GiB where max_num_seqs=8 requests run"
    ) in caplog.text
