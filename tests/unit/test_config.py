"""The das: block: what is accepted, what is refused, and how the refusal reads."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from omegaconf import OmegaConf

from das_adapter.config import DasConfig, parse
from das_adapter.errors import ConfigError
from das_adapter.protocol.engine_args import engine_args


@pytest.mark.parametrize("block", [None, {"drafter": "none"}, {"drafter": "none", "verify": {"noise": "stock"}}])
def test_nothing_to_do_leaves_the_host_alone(block: Any) -> None:
    assert parse(block) is None


def test_the_empty_block_is_the_history_drafter_with_keyed_noise() -> None:
    config = parse({})
    assert config == DasConfig()
    assert config.drafter == "history"
    assert config.keyed


def test_noise_follows_the_drafter_unless_it_is_named() -> None:
    assert not DasConfig(drafter="none").keyed
    keyed_off = parse({"drafter": "none", "verify": {"noise": "keyed"}})
    assert keyed_off is not None
    assert keyed_off.keyed
    stock = parse({"drafter": "history", "verify": {"noise": "stock"}})
    assert stock is not None
    assert not stock.keyed


def test_an_omegaconf_block_reads_like_a_dict() -> None:
    block = {"history": {"window": 3, "max_bytes": "512MiB"}, "budget": {"min_chance": 1}}
    assert parse(OmegaConf.create(block)) == parse(block)
    assert parse(block).history.max_bytes == 512 * 2**20
    assert parse(block).budget.min_chance == 1.0


def test_the_controller_decides_by_default() -> None:
    config = parse({})
    assert config is not None
    assert (config.budget.policy, config.toggle.mode, config.routing.policy) == ("optimal", "roofline", "longest_first")
    assert config.log_dir is None


@pytest.mark.parametrize(
    ("block", "key", "values"),
    [
        ("budget", "policy", ["optimal", "classes", "uniform", "unlimited"]),
        ("toggle", "mode", ["off", "threshold", "roofline"]),
        ("routing", "policy", ["longest_first", "least_loaded", "host"]),
    ],
)
def test_every_policy_can_be_named(block: str, key: str, values: list[str]) -> None:
    for value in values:
        config = parse({block: {key: value}})
        assert getattr(getattr(config, block), key) == value


def test_to_dict_reads_back_equal() -> None:
    config = parse({"drafter": "ngram", "budget": {"max_draft_tokens": 3}, "toggle": {"mode": "threshold",
                    "threshold": 7, "margin": 0.1}, "log_dir": "runs/decisions"})  # fmt: skip
    assert parse(config.to_dict()) == config


def test_lossy_settings_pass_where_they_are_allowed() -> None:
    lossy = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}
    verify = {"noise": "stock", "allow_lossy": True}
    config = parse({"drafter": "draft_model", "draft": {"model": "x", "options": lossy}, "verify": verify})
    assert engine_args(config)["speculative_config"] == {
        "method": "draft_model", "model": "x", "num_speculative_tokens": 3, **lossy
    }  # fmt: skip
    assert parse({"drafter": "mtp", "draft": {"options": {"rejection_sample_method": "block"}}}) is not None


@pytest.mark.parametrize(
    ("drafter", "proposer", "tokens"),
    [("history", "drafters.history.KeyedHistoryProposer", 16), ("self", "drafters.policy_copy.KeyedSelfProposer", 5),
     ("history+self", "drafters.mixed.KeyedMixedProposer", 16)],
)  # fmt: skip
def test_each_own_drafter_is_a_proposer_class(drafter: str, proposer: str, tokens: int) -> None:
    speculative = engine_args(parse({"drafter": drafter}))["speculative_config"]
    assert speculative == {
        "method": "custom_class", "model": f"das_adapter.engine.{proposer}", "num_speculative_tokens": tokens
    }  # fmt: skip
    stock = engine_args(parse({"drafter": drafter, "verify": {"noise": "stock"}}))["speculative_config"]
    assert stock["model"] == f"das_adapter.engine.{proposer.replace('Keyed', '')}"


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"drafter": "histroy"}, ["das.drafter", "'histroy'", "'history'", "'ngram'"]),
        ({"drafer": "history"}, ["das.drafer", "drafter", "unknown key"]),
        ({"history": {"windw": 3}}, ["das.history.windw", "window"]),
        ({"history": {"window": 0}}, ["das.history.window", "0", "1 or more"]),
        ({"history": {"window": "many"}}, ["das.history.window", "'many'", "int"]),
        ({"history": {"window": True}}, ["das.history.window", "True", "int"]),
        ({"history": {"max_bytes": "8 gigs"}}, ["das.history.max_bytes", "'8 gigs'", "8GiB"]),
        ({"history": {"scope": "request", "window": 4}}, ["das.history", "scope='request'"]),
        ({"history": []}, ["das.history", "[]", "scope, window, max_bytes"]),
        ({"budget": {"max_draft_tokens": 200}}, ["das.budget.max_draft_tokens", "200", "1 to 128"]),
        ({"budget": {"min_chance": -0.1}}, ["das.budget.min_chance", "-0.1"]),
        ({"budget": {"policy": "greedy"}}, ["das.budget.policy", "'greedy'", "'optimal'", "'classes'", "'unlimited'"]),
        ({"toggle": {"mode": "on"}}, ["das.toggle.mode", "'on'", "'off'", "'threshold'", "'roofline'"]),
        ({"toggle": {"margin": 1.5}}, ["das.toggle.margin", "1.5", "0.0 to 1.0"]),
        ({"toggle": {"mode": "threshold", "threshold": 0}}, ["das.toggle.threshold", "0", "1 or more"]),
        ({"toggle": {"treshold": 3}}, ["das.toggle.treshold", "did you mean 'threshold'"]),
        ({"toggle": {"threshold": 8}}, ["das.toggle.threshold=8", "das.toggle.mode='threshold'", "'roofline'"]),
        ({"toggle": {"calibration": 1}}, ["das.toggle.calibration", "1", "str"]),
        ({"log_dir": 5}, ["das.log_dir", "5", "str"]),
        ({"self": {"weights": "int2"}}, ["das.self.weights", "'int2'", "'int4'", "'int8'"]),
        ({"drafter": "self", "self": {"ladder": [5, 3]}}, ["das.self.ladder", "[5, 3]", "rising"]),
        ({"drafter": "self", "self": {"ladder": [3, 7]}}, ["das.self.ladder", "7", "1 to 5"]),
        ({"drafter": "self", "self": {"ladder": ["3"]}}, ["das.self.ladder[0]", "'3'", "int"]),
        ({"drafter": "self", "self": {"ladder": 3}}, ["das.self.ladder", "3", "a list"]),
        ({"drafter": "self", "self": {"max_tokens": 0}}, ["das.self.max_tokens", "0", "1 to 16"]),
        ({"drafter": "history", "self": {"max_tokens": 3}}, ["das.self", "'history'", "'self' or 'history+self'"]),
        (
            {"drafter": "history+self", "budget": {"max_draft_tokens": 4}},
            ["das.self.max_tokens", "5", "das.budget.max_draft_tokens=4"],
        ),
        ({"drafter": "self", "draft": {"model": "x"}}, ["das.draft", "'self'", "'eagle3'", "'draft_model'"]),
        ({"drafter": "eagle3"}, ["das.draft.model", "None", "'eagle3'"]),
        ({"drafter": "mtp", "draft": {"tokens": 99}}, ["das.draft.tokens", "99", "1 to 16"]),
        (
            {"drafter": "mtp", "draft": {"options": {"num_speculative_tokens": 4}}},
            ["das.draft.options.num_speculative_tokens", "4", "das.draft.tokens"],
        ),
        *(
            ({"drafter": "mtp", "draft": {"options": options}}, [f"das.draft.options.{key}", "das.verify.allow_lossy"])
            for key, options in (
                ("rejection_sample_method", {"rejection_sample_method": "synthetic"}),
                ("synthetic_acceptance_length", {"synthetic_acceptance_length": 3.0}),
                ("lenience", {"lenience": 0.9}),
            )
        ),
        (
            {
                "drafter": "mtp",
                "draft": {"options": {"rejection_sample_method": "synthetic"}},
                "verify": {"allow_lossy": True},
            },
            ["das.draft.options.rejection_sample_method", "das.verify.noise='stock'"],
        ),
        ({"routing": {"policy": "random"}}, ["das.routing.policy", "'random'", "'least_loaded'"]),
        ({"verify": {"seed": -1}}, ["das.verify.seed", "-1"]),
        ("history", ["das", "'history'", "drafter, history"]),
    ],
)
def test_bad_input_is_named_with_what_was_found_and_what_is_allowed(block: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(block)
    for word in words:
        assert word in str(caught.value)


def test_importing_the_config_costs_no_framework() -> None:
    code = "import sys, das_adapter.config; print(sorted({'torch','vllm','ray','verl','numpy'} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
