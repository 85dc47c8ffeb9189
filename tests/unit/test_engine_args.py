"""Which model runner of vLLM an engine gets, and what vLLM is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from das_adapter import compat
from das_adapter.config import parse
from das_adapter.engine import front_end
from das_adapter.engine.front_end import keep_draft_lengths
from das_adapter.engine.runner import Choice, runner_for
from das_adapter.engine.settings import (
    alone,
    draft_less,
    hosted,
    prepare_standalone,
)
from das_adapter.errors import ConfigError
from das_adapter.protocol import engine_args as args


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(compat, "version", lambda host: "0.32.0")
    monkeypatch.setattr(compat, "missing", lambda host: [])
    monkeypatch.setenv(args.RUNNER_VARIABLE, "")  # so that it is put back
    monkeypatch.delenv(args.RUNNER_VARIABLE)
    return monkeypatch


def needs_v1(block: dict[str, object]) -> str | None:
    return args.needs_v1(parse(block))


def test_history_runs_on_v2_and_leaves_the_environment_alone(
    newest: pytest.MonkeyPatch,
) -> None:
    config = parse({"drafter": "history"})
    assert args.needs_v1(config) is None
    found = args.v2_speculative_config(config)
    assert (found["method"], found["num_speculative_tokens"]) == ("ngram_gpu", 32)
    assert [entry[2] for entry in found["num_speculative_tokens_per_batch_size"]] == [
        32,
        16,
        8,
        4,
        2,
        1,
        0,
    ]
    off = parse({"drafter": "none", "verify": {"noise": "keyed"}})
    assert args.needs_v1(off) is None
    assert args.v2_speculative_config(off) is None


def test_neural_drafters_run_on_v2_with_the_lengths_that_the_controller_may_choose(
    newest: pytest.MonkeyPatch,
) -> None:
    block = {
        "drafter": "eagle3",
        "max_draft_tokens": 5,
        "draft": {"model": "m", "options": {"attention_backend": "x"}},
    }
    config = parse(block)
    assert args.needs_v1(config) is None
    table = [(1, 1, 5), (2, 2, 4), (3, 3, 2), (4, 4, 1), (5, 5, 0)]
    expected: dict[str, Any] = {
        "method": "eagle3",
        "model": "m",
        "num_speculative_tokens": 5,
        "attention_backend": "x",
    }
    expected |= {"draft_load_config": {"load_format": "auto"}}
    assert args.v2_speculative_config(config) == {
        **expected,
        "num_speculative_tokens_per_batch_size": table,
    }
    assert (
        args.v2_speculative_config(
            parse(block | {"budget": "unlimited", "speculate": "always"})
        )
        == expected
    )
    both = block | {"drafter": "history+eagle3", "max_draft_tokens": 16}
    config = parse(both)
    assert args.needs_v1(config) is None
    found = args.v2_speculative_config(config)
    lengths = [entry[2] for entry in found.pop("num_speculative_tokens_per_batch_size")]
    assert found == expected | {"num_speculative_tokens": 16}
    assert lengths == [16, 8, 4, 3, 2, 1, 0]
    assert "das.verify.noise=keyed" in str(
        needs_v1(both | {"verify": {"noise": "stock"}})
    )


@pytest.mark.parametrize(
    ("noise", "options", "method"),
    [
        ("stock", {}, "probabilistic"),
        ("stock", {"draft_sample_method": "greedy"}, "greedy"),
        ("stock", {"use_local_argmax_reduction": True}, None),
        ("keyed", {}, None),
    ],
)
def test_drafters_keep_their_probabilities_under_vllms_own_noise(
    noise: str, options: dict[str, object], method: str | None
) -> None:
    config = parse(
        {
            **EAGLE,
            "draft": {"model": "m", "options": options},
            "verify": {"noise": noise},
        }
    )
    assert args.v1_speculative_config(config).get("draft_sample_method") == method
    assert args.v2_speculative_config(config).get("draft_sample_method") == method


@pytest.mark.parametrize(
    ("drafter", "noise", "method"),
    [
        ("self", "stock", "probabilistic"),
        ("self", "keyed", None),
        ("history", "stock", None),
    ],
)
def test_of_what_stands_in_for_look_up_the_copy_alone_draws(
    drafter: str, noise: str, method: str | None
) -> None:
    found = args.v2_speculative_config(
        parse({"drafter": drafter, "verify": {"noise": noise}})
    )
    assert found.get("draft_sample_method") == method


@pytest.mark.parametrize(
    ("block", "lengths"),
    [
        ({"drafter": "self"}, [5, 4, 2, 1, 0]),
        ({"drafter": "history+self"}, [32, 16, 8, 5, 4, 2, 1, 0]),
    ],
)
def test_the_policy_copy_runs_on_v2_in_the_place_of_vllms_look_up_drafter(
    newest: pytest.MonkeyPatch, block: dict[str, object], lengths: list[int]
) -> None:
    config = parse(block)
    assert args.needs_v1(config) is None
    found = args.v2_speculative_config(config)
    assert (found["method"], found["num_speculative_tokens"]) == (
        "ngram_gpu",
        lengths[0],
    )
    assert [
        entry[2] for entry in found["num_speculative_tokens_per_batch_size"]
    ] == lengths


def test_what_needs_v1_says_why(newest: pytest.MonkeyPatch) -> None:
    assert str(needs_v1({"drafter": "ngram"})).startswith(
        "das.drafter='ngram' needs it"
    )
    newest.setenv(args.RUNNER_VARIABLE, "0")
    assert needs_v1({}) == "VLLM_USE_V2_MODEL_RUNNER=0 in the environment"
    newest.setenv(args.RUNNER_VARIABLE, "1")
    assert needs_v1({}) is None
    newest.setattr(compat, "missing", lambda host: [compat.Symbol("vllm.x", "gone")])
    assert needs_v1({}) == "vLLM 0.32.0 lacks vllm.x.gone"
    newest.setattr(
        compat,
        "missing",
        lambda host: (
            [] if host is compat.V2_RUNNER else [compat.Symbol("vllm.x", "new")]
        ),
    )
    assert needs_v1({"drafter": "self"}) == "vLLM 0.32.0 lacks vllm.x.new"
    draft_model: dict[str, object] = {
        "drafter": "history+draft_model",
        "draft": {"model": "m"},
    }
    newest.setattr(compat, "version", lambda host: "0.31.2")
    assert needs_v1(draft_model) == "vLLM 0.31.2 lacks vllm.x.new"
    newest.setattr(compat, "version", lambda host: "0.30.0")
    assert needs_v1(draft_model) == "vLLM 0.30.0 is older than 0.31.0"
    newest.setattr(compat, "version", lambda host: "0.29.0")
    for block in (
        {},
        {"drafter": "self"},
        {"drafter": "history+eagle3", "draft": {"model": "m"}},
    ):
        assert needs_v1(block) is None
    newest.setattr(compat, "version", lambda host: "0.28.0")
    assert needs_v1({}) == "vLLM 0.28.0 is older than 0.29.0"


@pytest.mark.parametrize(
    ("most", "lengths"),
    [(1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (20, (1, 2, 4, 8, 16, 20))],
)
def test_graphs_are_captured_for_powers_of_two_and_the_longest_draft(
    most: int, lengths: tuple[int, ...]
) -> None:
    assert args.draft_lengths(parse({"max_draft_tokens": most})) == lengths


def choose(
    block: dict[str, object], host: str = "host", triton: bool = True, **given: Any
) -> Choice:
    """Choose the runner of an engine with these arguments."""
    additional = {args.SETTINGS_KEY: block, args.REFRESHER: host}
    usual = {"async_scheduling": None, "load_format": "dummy", "max_model_len": 512}
    engine = SimpleNamespace(
        **{
            "additional_config": additional,
            "speculative_config": None,
            **usual,
            **given,
        }
    )
    return runner_for(engine, parse(block), triton)


EAGLE: dict[str, object] = {
    "drafter": "eagle3",
    "max_draft_tokens": 5,
    "draft": {"model": "m"},
}


@pytest.mark.parametrize(
    "block", [{"drafter": "history"}, EAGLE], ids=["history", "eagle3"]
)
def test_engines_of_a_host_run_v2_with_the_drafter_of_v2(
    newest: pytest.MonkeyPatch, block: dict[str, object]
) -> None:
    assert choose(block) == Choice(
        None, {"speculative_config": args.v2_speculative_config(parse(block))}
    )


@pytest.mark.parametrize(
    ("drafter", "kept"), [("history", True), ("none", False), ("", False)]
)
def test_data_parallel_engines_keep_the_draft_lengths_of_the_controller(
    drafter: str, kept: bool
) -> None:
    disabled: list[object] = []
    additional = {args.SETTINGS_KEY: {"drafter": drafter}} if drafter else {}
    engine = SimpleNamespace(additional_config=additional)
    keep_draft_lengths.replacement(disabled.append)(engine)
    assert bool(disabled) is not kept


def test_synchronous_scheduling_needs_v1_where_v2_would_draft_in_every_step(
    newest: pytest.MonkeyPatch,
) -> None:
    newest.setattr(
        compat,
        "missing",
        lambda host: [object()] if host is compat.V2_OWN_LENGTHS else [],
    )
    off: dict[str, object] = {"drafter": "none", "verify": {"noise": "keyed"}}
    assert choose(off, async_scheduling=False).v1 is None
    assert "scheduling is synchronous" in str(
        choose({"drafter": "history"}, async_scheduling=False).v1
    )


def test_an_engine_without_a_host_loads_a_drafter_with_weights_on_v1_and_stays_as_long(
    newest: pytest.MonkeyPatch,
) -> None:
    newest.setenv(args.RUNNER_VARIABLE, "0")
    changed = choose(EAGLE, host="").arguments
    assert changed["load_format"] == "auto" and "max_model_len" not in changed
    assert "load_format" not in choose(EAGLE).arguments


def test_a_parallel_drafter_is_refused_where_the_engine_runs_v1(
    newest: pytest.MonkeyPatch,
) -> None:
    block: dict[str, object] = {"drafter": "history+dflash", "draft": {"model": "m"}}
    config = parse(block)
    expected = args.v2_speculative_config(config)
    assert choose(block) == Choice(None, {"speculative_config": expected})
    assert expected is not None and expected["method"] == "dflash"
    assert expected["draft_load_config"] == {"load_format": "auto"}
    says = (
        "das.drafter: found 'history\\+dflash', allowed on vLLM's V2 model runner"
        " alone, from vLLM 0.29.0 on, but"
    )
    with pytest.raises(
        ConfigError, match=f"{says} the engine runs V1: vLLM finds no device"
    ):
        choose(block, triton=False)
    newest.setattr(compat, "version", lambda host: "0.28.0")
    with pytest.raises(
        ConfigError,
        match=f"{says} the engine runs V1: vLLM 0.28.0 is older than 0.29.0",
    ):
        # as a host has it
        choose(block, speculative_config=args.v1_speculative_config(config))


@pytest.mark.parametrize(
    ("drafter", "slots", "given", "expected"),
    [
        ("history+dflash", 16, {}, (8192, 8192 + 1024 * 16)),
        ("history+draft_model", 1, {}, (8192, 8192 + 1024)),
        ("history", 0, {}, (8192, 8192)),
        (
            "history+dflash",
            16,
            {"max_num_scheduled_tokens": 4096},
            (4096, 4096 + 1024 * 16),
        ),
        (
            "history+dflash",
            16,
            {"max_num_batched_tokens": 2**15, "max_num_scheduled_tokens": 2**14},
            (2**14, 2**15),
        ),
    ],
)
def test_slots_for_drafting_leave_a_step_the_tokens_that_it_has_without_drafts(
    newest: pytest.MonkeyPatch,
    drafter: str,
    slots: int,
    given: dict[str, int],
    expected: tuple[int, int],
) -> None:
    """vLLM takes them from `max_num_batched_tokens` for each request of a step; the
    arguments may be used again.
    """
    newest.setattr("vllm.triton_utils.HAS_TRITON", True)
    block = {
        "drafter": drafter,
        "draft": {} if drafter == "history" else {"model": "m"},
    }
    additional = {args.SETTINGS_KEY: block, args.REFRESHER: "host"}
    usual = {
        "max_num_batched_tokens": None,
        "max_num_scheduled_tokens": None,
        "runner": "auto",
        "model": "m",
    }
    usual |= {"additional_config": additional, "speculative_config": None}
    engine = SimpleNamespace(**{**usual, "async_scheduling": None, **given})

    def make(self: Any) -> Any:
        self.max_num_batched_tokens = self.max_num_batched_tokens or 8192
        sizes = SimpleNamespace(
            max_num_batched_tokens=self.max_num_batched_tokens, max_num_seqs=1024
        )
        sizes.max_num_scheduled_tokens = (
            self.max_num_scheduled_tokens or self.max_num_batched_tokens
        )
        speculative = SimpleNamespace(
            max_num_new_slots_for_drafting=slots,
            method=self.speculative_config["method"],
        )
        found = {
            "scheduler_config": sizes,
            "speculative_config": speculative,
            "parallel_config": None,
            "model_config": SimpleNamespace(is_hybrid=False, is_attention_free=False),
        }
        return SimpleNamespace(**found, use_v2_model_runner=True)

    newest.setattr(front_end, "refuse", lambda *_: None)
    for _ in range(2):
        made = front_end.choose_runner.replacement(make)(engine).scheduler_config
        assert (made.max_num_scheduled_tokens, made.max_num_batched_tokens) == expected
    assert engine.max_num_scheduled_tokens == given.get("max_num_scheduled_tokens")


def test_a_speculative_config_that_is_there_stays_and_needs_v1_without_a_host(
    newest: pytest.MonkeyPatch,
) -> None:
    own = {"method": "ngram"}
    assert choose({}, speculative_config=own) == Choice(
        None, {"async_scheduling": False}
    )
    why = "its speculative_config is not das-adapter's"
    off: dict[str, object] = {"drafter": "none", "verify": {"noise": "keyed"}}
    assert choose(off, host="", speculative_config=own) == Choice(why, {})


def test_a_speculative_config_is_refused_beside_a_drafter_without_a_host() -> None:
    engine = SimpleNamespace(
        speculative_config={"method": "ngram"}, additional_config={}
    )
    block = {
        "drafter": "none",
        "verify": {"noise": "keyed"},
        "history": {"run_ahead": "auto"},
    }
    off = parse(block)
    history = parse({})
    prepare_standalone(engine, off)
    with pytest.raises(
        ConfigError,
        match=r"das\.drafter='history' and speculative_config both choose a drafter",
    ):
        prepare_standalone(engine, history)


def test_what_v1_cannot_do_is_refused_where_the_engine_needs_it(
    newest: pytest.MonkeyPatch,
) -> None:
    routed = SimpleNamespace(enable_return_routed_experts=True)
    assert choose({}, aux_output_config=routed, async_scheduling=True).v1 is None
    with pytest.raises(ConfigError, match="found enable_return_routed_experts=True"):
        choose({}, triton=False, aux_output_config=routed)
    with pytest.raises(
        ConfigError, match="found async_scheduling=True, allowed: None or False"
    ):
        choose({}, triton=False, async_scheduling=True)


def test_a_driver_without_vllm_leaves_it_to_the_engine_which_runner_it_needs(
    newest: pytest.MonkeyPatch,
) -> None:
    ahead = {"async_scheduling": True}
    history = parse({})
    args.refuse_arguments(history, "das", "kwargs", ahead)
    newest.setattr(compat, "version", lambda host: "0.28.0")
    with pytest.raises(
        ConfigError,
        match=r"found kwargs\.async_scheduling=True, which vLLM's V1 runner refuses",
    ):
        args.refuse_arguments(history, "das", "kwargs", ahead)
    newest.setattr(compat, "version", lambda host: None)
    newest.setattr(compat, "missing", lambda host: [compat.Symbol("vllm.x", "gone")])
    args.refuse_arguments(history, "das", "kwargs", ahead)
    newest.setenv(args.RUNNER_VARIABLE, "0")
    with pytest.raises(ConfigError, match=r"found kwargs\.async_scheduling=True"):
        args.refuse_arguments(history, "das", "kwargs", ahead)


def test_an_engine_of_a_host_knows_that_it_has_one() -> None:
    config = parse({"drafter": "history"})
    arguments = SimpleNamespace(**args.engine_args(config, {"other": 1}))
    assert hosted(arguments) and not alone(arguments)
    assert arguments.additional_config["other"] == 1


@pytest.mark.parametrize(("requests", "fit"), [(10, 7), (40, 1)])
def test_drafts_beside_adapters_leave_each_request_its_own_token(
    requests: int, fit: int
) -> None:
    config = parse({"drafter": "history"})
    assert config is not None
    given = SimpleNamespace(
        max_num_batched_tokens=80, max_num_seqs=requests, additional_config={}
    )
    assert draft_less(given, config).num_draft_tokens == fit
    given.max_num_seqs = 41
    with pytest.raises(ConfigError, match="at most 0"):
        draft_less(given, config)
