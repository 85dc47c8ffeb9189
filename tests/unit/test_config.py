"""The das: block: what is accepted, what is refused, and how the refusal reads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import reference
from omegaconf import DictConfig, OmegaConf

from das_adapter import compat
from das_adapter.config import IN_EVERY_STEP, NEEDS, DasConfig, block_of, check_files, parse
from das_adapter.errors import ConfigError
from das_adapter.nemo_rl import settings as nemo_rl
from das_adapter.protocol.engine_args import DRAFTER, engine_args
from das_adapter.verl import settings as verl

ROOT = Path(__file__).resolve().parents[2]


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
    block = {
        "drafter": "history+self",
        "history": {"window": 3, "max_bytes": "512MiB"},
        "budget": {"policy": "uniform", "min_chance": 1},
        "self": {"ladder": [3, 5]},
    }
    config = parse(OmegaConf.create(block))
    assert config == parse(block)
    assert config is not None
    assert (config.history.max_bytes, config.budget.min_chance) == (512 * 2**20, 1.0)
    assert type(config.self.ladder) is list
    options = {"speculative_token_tree": [[0], [0, 1]], "nested": {"a": [1]}}
    neural = parse(OmegaConf.create({"drafter": "mtp", "draft": {"options": options}}))
    assert neural is not None
    assert json.loads(json.dumps(neural.draft.options)) == options
    assert type(neural.draft.options["nested"]["a"]) is list


def test_yamls_bare_off_is_the_mode_off() -> None:
    block = OmegaConf.create("{toggle: {mode: off}}")
    assert block.toggle.mode is False
    config = parse(block)
    assert config is not None
    assert config.toggle.mode == "off"


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
        ("routing", "leaders", ["auto", "off"]),
    ],
)
def test_every_policy_can_be_named(block: str, key: str, values: list[str]) -> None:
    for value in values:
        config = parse({block: {key: value}})
        assert getattr(getattr(config, block), key) == value


@pytest.mark.parametrize(
    "block",
    [
        {},
        {"drafter": "none", "verify": {"noise": "keyed"}, "budget": {"max_draft_tokens": 3}, "draft": {"tokens": 2}},
        {"budget": {"max_draft_tokens": 3}, "toggle": {"mode": "threshold", "threshold": 7}, "log_dir": "~/decisions"},
        {"history": {"window": 16, "max_bytes": "1GiB"}, "toggle": {"margin": 0.05}, "verify": {"seed": 2**63 - 1}},
        {"drafter": "ngram", "budget": {"max_draft_tokens": 3}, "verify": {"noise": "stock"}},
        {"drafter": "self", "self": {"weights": "int8", "max_tokens": 7, "ladder": [3, 7]}},
        {"drafter": "mtp", "draft": {"options": {"draft_sample_method": "greedy", "sizes": [1, 2]}}},
    ],
)
def test_to_dict_reads_back_equal(block: dict[str, Any]) -> None:
    config = parse(block)
    assert config is not None
    assert parse(json.loads(json.dumps(config.to_dict()))) == config


def test_the_home_directory_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = parse({"history": {"persist": "~/h"}, "toggle": {"calibration": "~/c.json"}, "log_dir": "~/logs"})
    assert config is not None
    assert (config.history.persist, config.toggle.calibration) == ("/home/someone/h", "/home/someone/c.json")
    assert config.log_dir == "/home/someone/logs"
    for given, model in {"~/eagle": "/home/someone/eagle", "hub/eagle": "hub/eagle"}.items():
        neural = parse({"drafter": "eagle3", "draft": {"model": given}})
        assert neural is not None
        assert neural.draft.model == model


def test_lossy_settings_pass_where_they_are_allowed() -> None:
    lossy = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}
    verify = {"noise": "stock", "allow_lossy": True}
    config = parse({"drafter": "draft_model", "draft": {"model": "x", "options": lossy}, "verify": verify})
    assert engine_args(config)["speculative_config"] == {
        "method": "draft_model",
        "model": "x",
        "num_speculative_tokens": 3,
        **lossy,
    }
    assert parse({"drafter": "mtp", "draft": {"options": {"rejection_sample_method": "block"}}}) is not None


@pytest.mark.parametrize(("drafter", "tokens"), [("history", 16), ("self", 5), ("history+self", 16)])
def test_our_drafters_are_one_proposer(drafter: str, tokens: int) -> None:
    speculative = engine_args(parse({"drafter": drafter}))["speculative_config"]
    assert speculative == {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": tokens}


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"drafter": "dspark"}, ["das.drafter: found 'dspark', which drafts whole blocks", "vLLM 0.24 has 'dflash'"]),
        ({"drafter": "histroy"}, ["das.drafter", "'histroy'", "'history'", "'ngram'"]),
        ({"drafter": False}, ["das.drafter: found False", "write `drafter: none`"]),
        ({"drafter": None}, ["das.drafter: found None", "write `drafter: none`"]),
        ({"drafer": "history"}, ["das.drafer: unknown key; did you mean 'drafter'? Allowed: drafter, history,"]),
        ({"zzzzzz": 1}, ["das.zzzzzz: unknown key. Allowed: drafter, history,"]),
        ({1: 2}, ["das.1: unknown key. Allowed: drafter, history,"]),
        ({"history": {"windw": 3}}, ["das.history.windw", "window"]),
        ({"history": {"window": 0}}, ["das.history.window", "0", "1 or more"]),
        ({"history": {"window": "many"}}, ["das.history.window", "'many'", "int"]),
        ({"history": {"window": True}}, ["das.history.window", "True", "int"]),
        ({"history": {"max_bytes": "8 gigs"}}, ["das.history.max_bytes", "'8 gigs'", "8GiB"]),
        ({"history": {"max_bytes": 8e9}}, ["das.history.max_bytes", "8000000000.0 (float)", "an integer"]),
        ({"history": {"max_bytes": "1KiB"}}, ["das.history.max_bytes", "1KiB", "65536 or more"]),
        ({"history": {"persist": ""}}, ["das.history.persist", "''", "a path"]),
        ({"history": {"scope": "request", "window": 4}}, ["das.history.window=4", "das.history.scope=", "'request'"]),
        ({"history": []}, ["das.history", "[]", "scope, window, max_bytes"]),
        ({"history": None}, ["das.history", "None", "scope, window, max_bytes"]),
        ({"histroy": {}, "toggle": {"margin": 2}}, ["das.histroy: unknown key", "das.toggle.margin: found 2"]),
        ({"budget": {"max_draft_tokens": 200}}, ["das.budget.max_draft_tokens", "200", "1 to 128"]),
        ({"budget": {"min_chance": -0.1}}, ["das.budget.min_chance", "-0.1"]),
        ({"budget": {"min_chance": float("nan")}}, ["das.budget.min_chance: found nan, allowed: 0 to 1"]),
        ({"budget": {"min_chance": float("inf")}}, ["das.budget.min_chance: found inf, allowed: 0 to 1"]),
        ({"budget": {"min_chance": "0.5"}}, ["das.budget.min_chance: found '0.5' (str), expected a number"]),
        ({"budget": {"min_chance": True}}, ["das.budget.min_chance: found True (bool), expected a number"]),
        ({"budget": {"policy": "greedy"}}, ["das.budget.policy", "'greedy'", "'optimal'", "'classes'", "'unlimited'"]),
        ({"toggle": {"mode": True}}, ["das.toggle.mode: found True", "'off', 'threshold' or 'roofline'"]),
        ({"toggle": {"mode": "on"}}, ["das.toggle.mode", "'on'", "'off'", "'threshold'", "'roofline'"]),
        ({"toggle": {"margin": 1.5}}, ["das.toggle.margin", "1.5", "0 to 1"]),
        ({"toggle": {"mode": "threshold", "threshold": 0}}, ["das.toggle.threshold", "0", "1 or more"]),
        ({"toggle": {"treshold": 3}}, ["das.toggle.treshold", "did you mean 'threshold'"]),
        ({"toggle": {"threshold": 8}}, ["das.toggle.threshold=8", "das.toggle.mode='threshold'", "'roofline'"]),
        ({"toggle": {"calibration": 1}}, ["das.toggle.calibration", "1", "str"]),
        ({"log_dir": 5}, ["das.log_dir", "5", "str"]),
        ({"self": {"weights": "int2"}}, ["das.self.weights", "'int2'", "'int4'", "'int8'"]),
        ({"drafter": "self", "self": {"ladder": [5, 3]}}, ["das.self.ladder", "[5, 3]", "rising"]),
        ({"drafter": "self", "self": {"ladder": [3, 7]}}, ["das.self.ladder", "7", "1 to 5"]),
        ({"drafter": "self", "self": {"ladder": ["3"]}}, ["das.self.ladder[0]", "'3'", "int"]),
        ({"drafter": "self", "self": {"ladder": []}}, ["das.self.ladder: found []", "rising"]),
        ({"drafter": "self", "self": {"ladder": [0, 3]}}, ["das.self.ladder: found [0, 3]", "1 to 5"]),
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
                ("rejection_sample_method", {"rejection_sample_method": "fly"}),
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
        ({"verify": {"seed": -1}}, ["das.verify.seed", "-1", "0 to 2^63 - 1"]),
        ({"verify": {"allow_lossy": "yes"}}, ["das.verify.allow_lossy", "'yes'", "true or false"]),
        ("history", ["das", "'history'", "drafter, history"]),
    ],
)
def test_bad_input_is_named_with_what_was_found_and_what_is_allowed(block: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(block)
    for word in words:
        assert word in str(caught.value)


def test_a_drafter_that_is_none_refuses_no_key() -> None:
    block = {
        "drafter": "none",
        "history": {"scope": "request", "window": 3},
        "budget": {"min_chance": 0.3},
        "toggle": {"threshold": 7},
        "draft": {"options": {"method": "x"}},
        "self": {"max_tokens": 3},
        "verify": {"seed": 3, "allow_lossy": True},
        "log_dir": "logs",
    }
    assert parse(block) is None
    assert parse({**block, "verify": {"noise": "keyed"}}) is not None


EVERYTHING = {
    "history.scope": "global",
    "history.window": 3,
    "history.max_bytes": "1GiB",
    "history.device_bytes": "1GiB",
    "budget.admission": "step",
    "history.persist": "x",
    "budget.policy": "classes",
    "budget.max_draft_tokens": 7,
    "budget.min_chance": 0.3,
    "toggle.mode": "roofline",
    "toggle.margin": 0.3,
    "toggle.threshold": 3,
    "toggle.calibration": "x",
    "routing.policy": "host",
    "routing.leaders": "off",
    "self.weights": "int8",
    "self.max_tokens": 3,
    "self.ladder": [3],
    "draft.model": "x",
    "draft.tokens": 2,
    "draft.weights": "trainer",
    "draft.options": {"x": 1},
    "verify.noise": "keyed",
    "verify.seed": 3,
    "verify.allow_lossy": True,
    "log_dir": "x",
}
HISTORY = {
    "history.scope",
    "history.window",
    "history.max_bytes",
    "history.persist",
    "budget.max_draft_tokens",
    "routing.leaders",
}
CONTROLLED = {
    "budget.policy",
    "budget.min_chance",
    "toggle.mode",
    "toggle.margin",
    "toggle.threshold",
    "log_dir",
    "toggle.calibration",
}
COPY = {"self.weights", "self.max_tokens", "self.ladder"}
NEURAL = {"draft.model", "draft.tokens", "draft.weights", "draft.options", "verify.allow_lossy"}
ANY = {"routing.policy", "verify.noise", "verify.seed"}


def block(keys: dict[str, Any]) -> dict[str, Any]:
    """A block of keys with dots."""
    result: dict[str, Any] = {}
    for key, value in keys.items():
        *parents, name = key.split(".")
        inner = result
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = value
    return result


@pytest.mark.parametrize("key", IN_EVERY_STEP)
def test_options_of_a_drafter_in_every_step_are_refused_with_the_controller(key: str) -> None:
    options = {"drafter": "eagle3", "draft": {"model": "x", "options": {key: True}}}
    for more in ({}, {"drafter": "history+eagle3"}, {"toggle": {"mode": "off"}}):
        with pytest.raises(ConfigError, match=f"^das.draft.options.{key}: found True, .*das.drafter='eagle3', das.bud"):
            parse({**options, **more})
    always = parse({**options, "budget": {"policy": "unlimited"}, "toggle": {"mode": "off"}})
    assert always is not None
    assert not always.controlled


@pytest.mark.parametrize(
    ("drafter", "acts"),
    [
        ("history", ANY | CONTROLLED | HISTORY | {"history.device_bytes", "budget.admission"}),
        ("self", ANY | CONTROLLED | COPY),
        ("history+self", ANY | CONTROLLED | HISTORY | COPY),
        ("ngram", ANY | CONTROLLED | {"budget.max_draft_tokens"}),
        *((neural, ANY | CONTROLLED | NEURAL) for neural in ("eagle3", "mtp", "draft_model")),
        *(
            (f"history+{neural}", ANY | CONTROLLED | HISTORY | NEURAL | {"history.device_bytes"})
            for neural in ("eagle3", "mtp", "draft_model")
        ),
    ],
)
def test_every_key_acts_with_the_drafter_or_is_refused(drafter: str, acts: set[str]) -> None:
    needed = {"budget.min_chance": {"budget.policy": "uniform"}, "toggle.threshold": {"toggle.mode": "threshold"}}
    model = {"draft.model": "checkpoint"} if drafter.endswith(("eagle3", "draft_model")) else {}
    assert {"drafter", *EVERYTHING} == {key for key, _ in reference.keys(DasConfig)}
    for key, value in EVERYTHING.items():
        given = block({"drafter": drafter, **model, **(needed.get(key, {}) if key in acts else {}), key: value})
        if key in acts:
            assert parse(given) is not None, key
        else:
            with pytest.raises(ConfigError, match=rf"^das\.{re.escape(key)}=.* has an effect only with das\.drafter="):
                parse(given)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"drafter": "eagle3", "budget.max_draft_tokens": 7},
            "das.budget.max_draft_tokens=7 has an effect only with das.drafter='history', 'history+self', "
            "'history+eagle3', 'history+mtp', 'history+draft_model' or 'ngram' (found 'eagle3'): use das.draft.tokens",
        ),
        (
            {"drafter": "self", "budget.max_draft_tokens": 7},
            "das.budget.max_draft_tokens=7 has an effect only with das.drafter='history', 'history+self', "
            "'history+eagle3', 'history+mtp', 'history+draft_model' or 'ngram' (found 'self'): use das.self.max_tokens",
        ),
        (
            {"drafter": "ngram", "history.window": 3},
            "das.history.window=3 has an effect only with das.drafter='history', 'history+self', 'history+eagle3', "
            "'history+mtp' or 'history+draft_model' (found 'ngram'): remove it",
        ),
        (
            {"budget.min_chance": 0.3},
            "das.budget.min_chance=0.3 has an effect only with das.budget.policy='classes' or 'uniform' "
            "(found 'optimal'): remove it",
        ),
        (
            {"budget.policy": "unlimited", "budget.min_chance": 0.3},
            "das.budget.min_chance=0.3 has an effect only with das.budget.policy='classes' or 'uniform' "
            "(found 'unlimited'): remove it",
        ),
        (
            {"toggle.mode": "off", "toggle.margin": 0.3},
            "das.toggle.margin=0.3 has an effect only with das.toggle.mode='roofline' (found 'off'): remove it",
        ),
        (
            {"history.scope": "request", "history.persist": "x"},
            "das.history.persist='x' has an effect only with das.history.scope='problem' or 'global' "
            "(found 'request'): remove it",
        ),
        (
            {"drafter": "mtp", "verify.noise": "stock", "verify.seed": 1},
            "das.verify.seed=1 has an effect only with das.verify.noise='keyed' (found 'stock'): remove it",
        ),
    ],
)
def test_a_key_without_effect_is_refused_with_what_it_needs(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(block(keys))
    assert str(caught.value) == message


def test_what_keys_need_is_said_of_keys_that_exist() -> None:
    existing = {key for key, _ in reference.keys(DasConfig)}
    for key, needs in NEEDS.items():
        assert any(k == key or k.startswith(f"{key}.") for k in existing), key
        assert needs.keys() <= existing


def test_an_empty_block_is_no_way_to_say_off_or_on() -> None:
    assert block_of(None, "custom") is None
    assert block_of({}, "custom") is None
    assert block_of({"das": {}}, "custom") == {}
    with pytest.raises(ConfigError, match=r"^custom\.das: found an empty block: .*`drafter: none`.*`das: \{\}`"):
        block_of(OmegaConf.create({"das": None}), "custom")


HOSTS_OWN_KEYS = [
    "backend",
    "colocated",
    "data",
    "max_new_tokens",
    "quant_cfg",
    "sglang_cfg",
    "stop_token_ids",
    "temperature",
    "top_k",
    "vllm_cfg",
    "vllm_kwargs",
    "ds",
    "dataset",
    "dp_size",
    "tas",
]


def test_a_misspelt_block_is_refused_and_the_hosts_own_keys_are_not() -> None:
    for key in ("dass", "DAS", "daas", "das_adapter", "das-adapter"):
        with pytest.raises(ConfigError, match=rf"^custom\.{key}: unknown key; did you mean 'das'\?"):
            block_of({"mine": 1, key: {}}, "custom")
    assert block_of(dict.fromkeys(HOSTS_OWN_KEYS, 1), "custom") is None
    assert block_of({"das": {}, "dask": 1}, "custom") == {}


def test_files_that_are_not_there_are_refused(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text("{}")
    bad.write_text("{")
    for key, value, words in [
        ("toggle.calibration", tmp_path / "none.json", "No such file"),
        ("toggle.calibration", tmp_path, "directory"),
        ("toggle.calibration", bad, "das-adapter calibrate wrote"),
        ("history.persist", tmp_path / "none", "a directory that exists"),
        ("log_dir", good, "a directory that can be written to"),
        ("log_dir", good / "logs", f"'{good}' can't"),
    ]:
        config = parse(block({key: str(value)}))
        assert config is not None
        with pytest.raises(ConfigError, match=rf"^das\.{key}: found '{value}'.*{re.escape(words)}"):
            check_files(config)
    keys = {"toggle.calibration": good, "history.persist": tmp_path, "log_dir": tmp_path / "new" / "logs"}
    config = parse(block({key: str(value) for key, value in keys.items()}))
    assert config is not None
    check_files(config)
    assert not (tmp_path / "new").exists()
    off = parse({"drafter": "none", "verify": {"noise": "keyed"}, "toggle": {"calibration": "nowhere.json"}})
    assert off is not None
    check_files(off)


def under_verl(das: Any = None, **rollout: Any) -> DictConfig:
    custom = {"das": das} if das is not None else {}
    rollout = {"name": "vllm", "custom": custom, "engine_kwargs": {"vllm": {}}, **rollout}
    return OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})


@pytest.fixture
def any_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "require", lambda host: None)


@pytest.mark.parametrize(
    ("das", "rollout", "message"),
    [
        (None, {"custom": {"das": None}}, "actor_rollout_ref.rollout.custom.das: found an empty block"),
        (None, {"custom": {"dass": {}}}, "actor_rollout_ref.rollout.custom.dass: unknown key; did you mean 'das'?"),
        ({"self": {"ladder": [3]}}, {}, "das.self.ladder=[3] has an effect only with"),
        ({"toggle": {"calibration": "nowhere.json"}}, {}, "das.toggle.calibration: found 'nowhere.json'"),
        (
            {},
            {"disaggregation": {"enabled": True}},
            "custom.das: found actor_rollout_ref.rollout.disaggregation.enabled=True, whose replicas take the place of",
        ),
        (
            {},
            {"engine_kwargs": {"vllm": {"additional_config": '{"a": 1}'}}},
            "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config: found '{\"a\": 1}', expected a mapping",
        ),
    ],
)
def test_verl_is_stopped_before_anything_starts(das: Any, rollout: Any, message: str, any_host: None) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        verl.check(under_verl(das, **rollout))


def test_verl_goes_on_with_a_block_that_is_right(any_host: None) -> None:
    assert verl.check(under_verl()) is None
    assert verl.check(under_verl({"drafter": "none"})) is None
    assert verl.check(under_verl({}, engine_kwargs={"vllm": {"additional_config": {"a": 1}}})) == DasConfig()
    ladder = verl.check(under_verl({"drafter": "self", "self": {"ladder": [3, 5]}}))
    assert ladder is not None
    assert ladder.self.ladder == [3, 5]


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"das": None}, "policy.generation.das: found an empty block"),
        ({"dass": {}}, "policy.generation.dass: unknown key; did you mean 'das'?"),
        (
            {"vllm_kwargs": {"additional_config": {"das": None}}},
            "policy.generation.vllm_kwargs.additional_config.das: found an empty block",
        ),
        (
            {"das": {}, "vllm_kwargs": {"additional_config": '{"a": 1}'}},
            "policy.generation.vllm_kwargs.additional_config: found '{\"a\": 1}', expected a mapping",
        ),
        (
            {"das": {}, "vllm_kwargs": {"additional_config": {"das": {"drafter": "ngram"}}}},
            "policy.generation.das and policy.generation.vllm_kwargs.additional_config.das differ: set the latter to "
            "${policy.generation.das}, or remove it",
        ),
        ({"das": {"toggle": {"calibration": "nowhere.json"}}}, "das.toggle.calibration: found 'nowhere.json'"),
        ({"das": {"history": {"persist": "x"}}}, "das.history.persist: found 'x', expected a directory that exists"),
        (
            {"backend": "sglang", "das": {}},
            "policy.generation.das: found policy.generation.backend='sglang', allowed: 'vllm'",
        ),
    ],
)
def test_nemo_rl_is_stopped_before_anything_starts(generation: Any, message: str, any_host: None) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        nemo_rl.check(generation)


def test_nemo_rl_goes_on_with_a_block_that_is_right(any_host: None) -> None:
    stock = dict.fromkeys(HOSTS_OWN_KEYS, None)
    assert nemo_rl.check(stock) is None
    assert nemo_rl.check({**stock, "vllm_kwargs": {"additional_config": '{"a": 1}'}}) is None
    both = {**stock, "backend": "vllm", "das": {}, "vllm_kwargs": {"additional_config": {"das": {}}}}
    assert nemo_rl.check(both) == DasConfig()
    assert nemo_rl.check({"das": {"drafter": "none", "history": {"persist": "x"}}}) is None


def blocks(node: Any) -> Iterator[dict[str, Any]]:
    """Every `das:` block of a YAML file."""
    for key, value in node.items() if isinstance(node, dict) else []:
        if key == "das" and isinstance(value, dict):
            yield value
        else:
            yield from blocks(value)


SHIPPED = [
    (path.relative_to(ROOT), found)
    for path in sorted([*ROOT.glob("configs/**/*.yaml"), *ROOT.glob("examples/**/*.yaml")])
    for found in blocks(OmegaConf.to_container(OmegaConf.load(path)))
]


@pytest.mark.parametrize(("path", "found"), SHIPPED, ids=lambda value: str(value) if isinstance(value, Path) else "")
def test_shipped_blocks_are_right_and_off_in_one_line(path: Path, found: dict[str, Any]) -> None:
    assert parse(found) is not None
    assert parse({**found, "drafter": "none"}) is None


def test_there_are_shipped_blocks_of_both_hosts() -> None:
    assert {path.parts[:2] for path, _ in SHIPPED} == {
        ("configs", "nemo_rl"),
        ("examples", "nemo_rl"),
        ("examples", "verl"),
    }


def test_the_readme_has_the_table_of_keys_that_the_models_give() -> None:
    text = reference.PAGE.read_text()
    assert reference.update(text) == text, "run python tools/reference.py"


def test_every_key_is_documented() -> None:
    for key, field in reference.keys(DasConfig):
        assert field.description, key
        optional = field.get_default(call_default_factory=True) is None
        assert ("None:" in field.description) == optional, key


def test_importing_the_config_costs_no_framework() -> None:
    heavy = ("torch", "vllm", "ray", "verl", "numpy", "omegaconf", "nemo_rl")
    code = f"import sys, das_adapter.config; print(sorted({set(heavy)} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
