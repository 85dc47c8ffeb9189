"""The das: block: what is accepted, what is refused, and how the refusal reads."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import reference
import yaml
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel

from das_adapter import compat
from das_adapter.config import NEEDS, DasConfig, block_of, check_files, parse, read
from das_adapter.config_errors import IN_EVERY_STEP, SUCCESSORS, unwritable
from das_adapter.errors import ConfigError
from das_adapter.nemo_rl import checkpoint
from das_adapter.nemo_rl import settings as nemo_rl
from das_adapter.protocol.engine_args import v1_speculative_config
from das_adapter.verl import hooks
from das_adapter.verl import settings as verl

ROOT = Path(__file__).resolve().parents[2]
NEURAL_DRAFTERS = ("eagle3", "mtp", "draft_model", "dflash", "dspark")
KEYS = [key for key, _ in reference.keys(DasConfig)]


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


@pytest.mark.parametrize(
    "given",
    [None, {"drafter": "none"}, {"drafter": "none", "verify": {"noise": "stock"}}],
)
def test_nothing_to_do_leaves_the_host_alone(given: Any) -> None:
    assert parse(given) is None


def test_the_empty_block_is_the_history_under_the_controller_with_keyed_noise() -> None:
    config = parse({})
    assert config == DasConfig()
    assert (config.drafter, config.keyed, config.num_draft_tokens, config.log_dir) == (
        "history",
        True,
        32,
        None,
    )
    assert (config.speculate, config.budget, config.routing) == (
        "auto",
        "optimal",
        "longest_first",
    )


def test_a_block_has_at_most_19_keys() -> None:
    assert len(KEYS) <= 19


def test_noise_follows_the_drafter_unless_it_is_named() -> None:
    assert not DasConfig(drafter="none").keyed
    assert parse({"drafter": "none", "verify": {"noise": "keyed"}}).keyed
    assert not parse({"drafter": "history", "verify": {"noise": "stock"}}).keyed


def test_an_omegaconf_block_reads_like_a_dict() -> None:
    given = {
        "drafter": "history+self",
        "history": {"max_bytes": "512MiB"},
        "max_draft_tokens": 7,
        "self": {"weights": "int8"},
    }
    config = parse(OmegaConf.create(given))
    assert config == parse(given)
    assert config.history.max_bytes == 512 * 2**20
    options = {"speculative_token_tree": [[0], [0, 1]], "nested": {"a": [1]}}
    neural = parse(OmegaConf.create({"drafter": "mtp", "draft": {"options": options}}))
    assert json.loads(json.dumps(neural.draft.options)) == options
    assert type(neural.draft.options["nested"]["a"]) is list


@pytest.mark.parametrize(
    ("drafter", "given", "all_tokens", "of_a_model"),
    [
        ("history", None, 32, None),
        ("history", 128, 128, None),
        ("ngram", None, 32, None),
        ("ngram", 4, 4, None),
        ("self", None, 5, 5),
        ("self", 16, 16, 16),
        ("history+self", None, 32, 5),
        ("history+self", 4, 4, 4),
        ("history+self", 32, 32, 5),
        ("eagle3", None, 3, 3),
        ("mtp", 7, 7, 7),
        ("history+mtp", None, 32, 3),
        ("history+mtp", 2, 2, 2),
        ("history+draft_model", 64, 64, 3),
        ("dflash", None, 7, 7),
        ("history+dspark", None, 32, 7),
    ],
)
def test_one_key_limits_the_drafts_of_every_drafter(
    drafter: str, given: int | None, all_tokens: int, of_a_model: int | None
) -> None:
    config = DasConfig(drafter=drafter, max_draft_tokens=given)  # type: ignore[arg-type]
    assert config.num_draft_tokens == all_tokens
    assert of_a_model is None or config.model_tokens == of_a_model


@pytest.mark.parametrize(
    "given",
    [
        {},
        {
            "drafter": "none",
            "verify": {"noise": "keyed"},
            "max_draft_tokens": 3,
            "draft": {"model": "x"},
        },
        {"max_draft_tokens": 3, "speculate": 7, "log_dir": "~/decisions"},
        {
            "history": {"max_bytes": "1GiB"},
            "speculate": "always",
            "verify": {"seed": 2**63 - 1},
        },
        {
            "drafter": "ngram",
            "budget": "das",
            "routing": "host",
            "verify": {"noise": "stock"},
        },
        {"drafter": "self", "max_draft_tokens": 7, "self": {"weights": "int8"}},
        {"drafter": "self", "max_draft_tokens": 16},
        {
            "drafter": "mtp",
            "draft": {"options": {"draft_sample_method": "greedy", "sizes": [1, 2]}},
        },
    ],
)
def test_to_dict_reads_back_equal(given: dict[str, Any]) -> None:
    config = parse(given)
    assert parse(json.loads(json.dumps(config.to_dict()))) == config


def test_a_key_that_is_off_may_be_written_so_in_yaml() -> None:
    """YAML and Hydra's command line read `off` as a truth value."""
    for off in ("off", "'off'"):
        assert (
            parse(yaml.safe_load(f"history: {{run_ahead: {off}}}")).history.run_ahead
            == "off"
        )


def test_json_is_read_as_json(tmp_path: Path) -> None:
    given = {"draft": {"options": {"threshold": 1e-05}}}
    text = json.dumps(given, indent="\t")
    path = tmp_path / "das.json"
    path.write_text(text)
    assert read(text) == read(str(path)) == given, (
        "tabs between values, and numbers that are text in YAML"
    )
    assert read("{drafter: self}") == {"drafter": "self"}, (
        "YAML's short form is read as before"
    )


def test_the_home_directory_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = parse({"history": {"load": "~/h"}, "log_dir": "~/logs"})
    assert (config.history.load, config.log_dir) == (
        "/home/someone/h",
        "/home/someone/logs",
    )
    for given, model in {
        "~/eagle": "/home/someone/eagle",
        "hub/eagle": "hub/eagle",
    }.items():
        assert (
            parse({"drafter": "eagle3", "draft": {"model": given}}).draft.model == model
        )


def test_options_reach_vllm() -> None:
    options = {"rejection_sample_method": "block", "draft_sample_method": "greedy"}
    config = parse(
        {"drafter": "draft_model", "draft": {"model": "x", "options": options}}
    )
    expected = {
        "method": "draft_model",
        "model": "x",
        "num_speculative_tokens": 3,
        **options,
    }
    assert config is not None and v1_speculative_config(config) == expected


SIZE = "allowed: a number of bytes, 65536 or more, or a size such as 512MiB"
SPECULATE = "allowed: 'auto', 'always', or a number of running requests, 1 or more"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"drafter": "histroy"}, ["das.drafter", "'histroy'", "'history'", "'ngram'"]),
        ({"drafter": False}, ["das.drafter: found False", "'none'"]),
        ({"drafter": None}, ["das.drafter: found None", "'none'"]),
        (
            {"drafer": "history"},
            [
                "das.drafer: unknown key; did you mean 'drafter'? Allowed: drafter,"
                " max_draft"
            ],
        ),
        (
            {"zzzzzz": 1},
            ["das.zzzzzz: unknown key. Allowed: drafter, max_draft_tokens,"],
        ),
        ({1: 2}, ["das.1: unknown key. Allowed: drafter, max_draft_tokens,"]),
        ({"history": {"scpe": "global"}}, ["das.history.scpe", "did you mean 'scope'"]),
        *(
            ({"history": {key: value}}, [f"das.history.{key}: found {value!r}: {SIZE}"])
            for key in ("max_bytes", "device_bytes")
            for value in ("8 gigs", "8GiB x", "8GiB8", "1.2.3GiB", "", 8e9, True, -1)
        ),
        (
            {"history": {"max_bytes": "1KiB"}},
            ["das.history.max_bytes", "1KiB", "equal to 65536"],
        ),
        (
            {"history": {"run_ahead": True}},
            ["das.history.run_ahead: found True", "'auto' or 'off'"],
        ),
        (
            {"history": {"load": ""}},
            ["das.history.load: found ''", "allowed: null, a directory, or false"],
        ),
        (
            {"history": {"load": True}},
            ["das.history.load: found True", "allowed: null, a directory, or false"],
        ),
        ({"history": []}, ["das.history: found []", "dictionary"]),
        ({"history": None}, ["das.history: found None", "dictionary"]),
        (
            {"histroy": {}, "max_draft_tokens": 0},
            ["das.histroy: unknown key", "das.max_draft_tokens: found 0"],
        ),
        (
            {"max_draft_tokens": 200},
            ["das.max_draft_tokens: found 200: ", "less than or equal to 128"],
        ),
        ({"max_draft_tokens": "8"}, ["das.max_draft_tokens: found '8': ", "integer"]),
        ({"max_draft_tokens": True}, ["das.max_draft_tokens: found True: ", "integer"]),
        (
            {"drafter": "self", "max_draft_tokens": 17},
            ["das.max_draft_tokens: found 17", "'self': 1 to 16"],
        ),
        (
            {"drafter": "mtp", "max_draft_tokens": 99},
            ["das.max_draft_tokens: found 99", "'mtp': 1 to 16"],
        ),
        (
            {"budget": "greedy"},
            ["das.budget", "'greedy'", "'optimal'", "'das'", "'unlimited'"],
        ),
        ({"budget": {}}, ["das.budget: found {}", "'optimal'"]),
        *(
            ({"speculate": value}, [f"das.speculate: found {value!r}: {SPECULATE}"])
            for value in (True, "on", 1.5, -1, False, None, 0)
        ),
        ({"routing": "random"}, ["das.routing", "'random'", "'least_loaded'"]),
        ({"log_dir": 5}, ["das.log_dir", "5", "string"]),
        (
            {"self": {"weights": "int2"}},
            ["das.self.weights", "'int2'", "'int4'", "'int8'"],
        ),
        (
            {"drafter": "self", "self": {"ladder": [3, 5]}},
            ["das.self.ladder: unknown key. Allowed: weights"],
        ),
        ({"drafter": "eagle3"}, ["das.draft.model", "None", "'eagle3'"]),
        (
            {"drafter": "history+dspark"},
            ["das.draft.model", "None", "'history+dspark'"],
        ),
        (
            {"drafter": "mtp", "draft": {"options": {"num_speculative_tokens": 4}}},
            ["das.draft.options.num_speculative_tokens", "4", "das.max_draft_tokens"],
        ),
        *(
            (
                {"drafter": "mtp", "draft": {"options": options}},
                [f"das.draft.options.{next(iter(options))}", "remove"],
            )
            for options in (
                {
                    "rejection_sample_method": "synthetic",
                    "synthetic_acceptance_length": 2.0,
                },
                {"rejection_sample_method": "fly"},
                {"synthetic_acceptance_length": 3.0},
                {"lenience": 0.9},
            )
        ),
        (
            {
                "drafter": "eagle3",
                "draft": {"model": "x"},
                "budget": "unlimited",
                "speculate": "always",
                "log_dir": "x",
            },
            [
                "das.log_dir: found 'x', allowed: null, because nothing is decided with"
                " das.budget='unlimited'"
            ],
        ),
        ({"verify": {"seed": -1}}, ["das.verify.seed: found -1", "equal to 0"]),
        ("history", ["das: found 'history'", "dictionary"]),
    ],
)
def test_bad_input_is_named_with_what_was_found_and_what_is_allowed(
    given: Any, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(given)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("key", SUCCESSORS)
def test_a_key_that_there_is_no_longer_is_refused_with_its_successor(key: str) -> None:
    for drafter in ("history", "none"):
        with pytest.raises(ConfigError) as caught:
            parse(
                OmegaConf.create(
                    block({"drafter": drafter, key.removeprefix("das."): 5})
                )
            )
        assert str(caught.value).startswith(
            f"{key}: unknown key; write {SUCCESSORS[key]} in its place. Allowed: "
        )


def test_a_drafter_that_is_none_refuses_no_key_of_today() -> None:
    given = {
        "drafter": "none",
        "history": {"scope": "request", "max_bytes": "1GiB"},
        "max_draft_tokens": 99,
        "draft": {"options": {"method": "x"}},
        "self": {"weights": "int8"},
        "verify": {"seed": 3},
        "log_dir": "logs",
    }
    assert parse(given) is None
    assert parse({**given, "verify": {"noise": "keyed"}}) is not None


@pytest.mark.parametrize(
    "key", sorted({*IN_EVERY_STEP, "enable_adaptive_verification"})
)
def test_options_of_a_drafter_in_every_step_are_refused_with_the_controller(
    key: str,
) -> None:
    options = {"drafter": "eagle3", "draft": {"model": "x", "options": {key: True}}}
    for more in ({}, {"drafter": "history+eagle3"}, {"speculate": "always"}):
        with pytest.raises(
            ConfigError,
            match=(
                f"^das.draft.options.{key}: found True, .*das.drafter='eagle3', das.bud"
            ),
        ):
            parse({**options, **more})
    assert not parse(
        {**options, "budget": "unlimited", "speculate": "always"}
    ).controlled


VALUES: dict[str, Any] = {
    "max_draft_tokens": 7,
    "speculate": 3,
    "budget": "das",
    "routing": "host",
    "log_dir": "x",
    "verify.noise": "keyed",
    "verify.seed": 3,
    "history.scope": "global",
    "history.max_bytes": "1GiB",
    "history.load": "x",
    "history.run_ahead": "auto",
    "history.device_bytes": "1GiB",
    "history.others": "auto",
    "self.weights": "int8",
    "draft.model": "x",
    "draft.weights": "trainer",
    "draft.options": {"x": 1},
}


@pytest.mark.parametrize(
    "drafter",
    [
        "history",
        "self",
        "history+self",
        "ngram",
        *NEURAL_DRAFTERS,
        *(f"history+{name}" for name in NEURAL_DRAFTERS),
    ],
)
def test_every_key_acts_with_the_drafter_or_is_refused(drafter: str) -> None:
    assert {"drafter", *VALUES} == set(KEYS)
    sources = drafter.split("+")
    acts = {
        "history": "history" in sources,
        "self": "self" in sources,
        "draft": any(name in sources for name in NEURAL_DRAFTERS),
    }
    model = (
        {"draft.model": "checkpoint"}
        if acts["draft"] and not drafter.endswith("mtp")
        else {}
    )
    for key, value in VALUES.items():
        given = block({"drafter": drafter, **model, key: value})
        if acts.get(key.partition(".")[0], True):
            assert parse(given) is not None, key
        else:
            with pytest.raises(
                ConfigError,
                match=(
                    rf"^das\.{re.escape(key)}=.* has an effect only with das\.drafter="
                ),
            ):
                parse(given)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"drafter": "ngram", "history.max_bytes": 2**20},
            (
                "das.history.max_bytes=1048576 has an effect only with"
                " das.drafter='history' or 'history+self' or 'history+eagle3' or"
                " 'history+mtp' or 'history+draft_model' or 'history+dflash' or"
                " 'history+dspark' (found 'ngram'): remove it"
            ),
        ),
        (
            {"history.scope": "request", "history.load": "x"},
            (
                "das.history.load='x' has an effect only with"
                " das.history.scope='problem' or 'trusted' or 'global' (found"
                " 'request'): remove it"
            ),
        ),
        (
            {"drafter": "mtp", "verify.noise": "stock", "verify.seed": 1},
            (
                "das.verify.seed=1 has an effect only with das.verify.noise='keyed'"
                " (found 'stock'): remove it"
            ),
        ),
    ],
)
def test_a_key_without_effect_is_refused_with_what_it_needs(
    keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(block(keys))
    assert str(caught.value) == message


def test_what_keys_need_is_said_of_keys_that_exist() -> None:
    for key, needs in NEEDS.items():
        assert any(k == key or k.startswith(f"{key}.") for k in KEYS), key
        assert needs.keys() <= set(KEYS)


HOSTS_OWN_KEYS = """backend colocated data max_new_tokens quant_cfg sglang_cfg stop_token_ids temperature top_k
    vllm_cfg vllm_kwargs ds dataset dp_size tas""".split()


def test_a_misspelt_block_is_refused_and_the_hosts_own_keys_are_not() -> None:
    for key in ("dass", "DAS", "daas", "das_adapter", "das-adapter"):
        with pytest.raises(
            ConfigError, match=rf"^custom\.{key}: unknown key; did you mean 'das'\?"
        ):
            block_of({"mine": 1, key: {}}, "custom")
    assert block_of(dict.fromkeys(HOSTS_OWN_KEYS, 1), "custom") is None
    assert block_of({"das": {}, "dask": 1}, "custom") == {}


def test_files_that_are_not_there_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "good.json"
    file.write_text("{}")
    for key, value, words in [
        ("history.load", tmp_path / "none", "a directory that exists"),
        ("history.load", file, "a directory that exists"),
        ("log_dir", file, "a directory that can be written to"),
        ("log_dir", file / "logs", "a directory that can be written to"),
    ]:
        config = parse(block({key: str(value)}))
        with pytest.raises(
            ConfigError, match=rf"^das\.{key}: found '{value}'.*{re.escape(words)}"
        ):
            check_files(config)
    keys = {"history.load": tmp_path, "log_dir": tmp_path / "new" / "logs"}
    check_files(parse(block({key: str(value) for key, value in keys.items()})))
    check_files(
        parse(
            {
                "drafter": "none",
                "verify": {"noise": "keyed"},
                "history": {"load": "nowhere"},
            }
        )
    )


def under_verl(das: Any = None, **rollout: Any) -> DictConfig:
    custom = {"das": das} if das is not None else {}
    rollout = {
        "name": "vllm",
        "custom": custom,
        "engine_kwargs": {"vllm": {}},
        **rollout,
    }
    return OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})


@pytest.fixture
def any_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "require", lambda host: None)


@pytest.mark.parametrize(
    ("das", "rollout", "message"),
    [
        (
            None,
            {"custom": {"das": None}},
            "actor_rollout_ref.rollout.custom.das: found an empty block",
        ),
        (
            None,
            {"custom": {"dass": {}}},
            "actor_rollout_ref.rollout.custom.dass: unknown key; did you mean 'das'?",
        ),
        (
            {"self": {"weights": "int8"}},
            {},
            "das.self.weights='int8' has an effect only with",
        ),
        ({"history": {"load": "nowhere"}}, {}, "das.history.load: found 'nowhere'"),
        (
            {},
            {"full_determinism": True},
            "and actor_rollout_ref.rollout.full_determinism both choose a router: set",
        ),
        (
            {},
            {"checkpoint_engine": {"backend": "delta_sharded"}},
            (
                "custom.das.drafter='history': found"
                " actor_rollout_ref.rollout.checkpoint_engine.backend='delta_sharded'"
            ),
        ),
        (
            {},
            {"name": "sglang"},
            (
                "custom.das: found actor_rollout_ref.rollout.name='sglang' beside it,"
                " allowed: 'vllm'"
            ),
        ),
        (
            {},
            {"disaggregation": {"enabled": True}},
            (
                "custom.das: found"
                " actor_rollout_ref.rollout.disaggregation.enabled=True beside it,"
                " allowed: False or None"
            ),
        ),
        (
            {},
            {"engine_kwargs": {"vllm": {"additional_config": '{"a": 1}'}}},
            (
                "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config: found"
                " '{\"a\": 1}', expected a mapping"
            ),
        ),
    ],
)
def test_verl_is_stopped_before_anything_starts(
    das: Any, rollout: Any, message: str, any_host: None
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        verl.check(under_verl(das, **rollout))


@pytest.mark.parametrize("das", [None, {"drafter": "none"}, {}], ids=str)
def test_a_block_in_the_environment_of_a_hosts_run_stops_it(
    das: Any, monkeypatch: pytest.MonkeyPatch, any_host: None
) -> None:
    monkeypatch.setenv("DAS_CONFIG", "/somewhere/das.yaml")
    for check, block in (
        (lambda: verl.check(under_verl(das)), verl.BLOCK),
        (lambda: nemo_rl.check({"backend": "vllm", "das": das}), nemo_rl.BLOCK),
    ):
        with pytest.raises(
            ConfigError,
            match=f"DAS_CONFIG: found '/somewhere/das.yaml', .* because {block} has",
        ):
            check()
    monkeypatch.setenv("DAS_CONFIG", "")
    assert verl.check(under_verl(das)) == (None if das is None else parse(das))


@pytest.mark.parametrize(
    ("model", "has_adapters"),
    [
        ({"lora_rank": 8}, True),
        ({"lora": {"rank": 8, "merge": False}}, True),
        ({"lora": {"rank": 8, "merge": True}}, False),
        ({"lora_rank": 0}, False),
        ({}, False),
    ],
)
def test_verls_engines_have_adapters_that_are_not_merged(
    model: dict[str, Any], has_adapters: bool
) -> None:
    config = under_verl({})
    config.actor_rollout_ref.model = model
    assert verl.engine_arguments(config)["enable_lora"] == has_adapters


def test_verl_goes_on_with_a_block_that_is_right(any_host: None) -> None:
    assert verl.check(under_verl()) is None
    assert verl.check(under_verl({"drafter": "none"})) is None
    assert (
        verl.check(
            under_verl({}, engine_kwargs={"vllm": {"additional_config": {"a": 1}}})
        )
        == DasConfig()
    )
    keyed = {"drafter": "none", "verify": {"noise": "keyed"}}
    assert verl.check(
        under_verl(keyed, checkpoint_engine={"backend": "delta_sharded"})
    ) == parse(keyed)
    routed = under_verl({"routing": "host"}, full_determinism=True)
    assert verl.check(routed) == parse({"routing": "host"})
    copy = verl.check(under_verl({"drafter": "self", "self": {"weights": "int8"}}))
    assert copy.self.weights == "int8"


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"das": None}, "policy.generation.das: found an empty block"),
        ({"dass": {}}, "policy.generation.dass: unknown key; did you mean 'das'?"),
        (
            {"das": {}, "vllm_kwargs": {"additional_config": '{"a": 1}'}},
            (
                "policy.generation.vllm_kwargs.additional_config: found '{\"a\": 1}',"
                " expected a mapping"
            ),
        ),
        (
            {"das": {"history": {"load": "x"}}},
            "das.history.load: found 'x', expected a directory that exists",
        ),
        (
            {"backend": "sglang", "das": {}},
            (
                "policy.generation.das: found policy.generation.backend='sglang' beside"
                " it, allowed: 'vllm'"
            ),
        ),
        (
            {"das": {}, "vllm_kwargs": {"speculative_config": {"method": "ngram"}}},
            "both choose a drafter",
        ),
        (
            {"das": {"history": {"scope": "trusted"}}},
            "das.history.scope: found 'trusted', which is for engines whose",
        ),
        (
            {"das": {}, "quant_cfg": "fp8"},
            "found policy.generation.quant_cfg='fp8' beside it, allowed: None",
        ),
        (
            {"das": {}, "worker_extension_cls_fqn": "theirs"},
            "found policy.generation.worker_extension_cls_fqn='theirs'",
        ),
        (
            {"das": {}, "vllm_cfg": {"pipeline_parallel_size": 2}},
            (
                "found policy.generation.vllm_cfg.pipeline_parallel_size=2 beside it,"
                " allowed: 1"
            ),
        ),
    ],
)
def test_nemo_rl_is_stopped_before_anything_starts(
    generation: Any, message: str, any_host: None
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        nemo_rl.check(generation)


def test_nemo_rl_goes_on_with_a_block_that_is_right(any_host: None) -> None:
    stock = dict.fromkeys(HOSTS_OWN_KEYS, None)
    assert nemo_rl.check(stock) is None
    assert (
        nemo_rl.check({**stock, "vllm_kwargs": {"additional_config": '{"a": 1}'}})
        is None
    )
    # the overlay
    both = {
        **stock,
        "backend": "vllm",
        "das": {},
        "vllm_kwargs": {"additional_config": {"das": {}}},
    }
    assert nemo_rl.check(both) == DasConfig()
    assert nemo_rl.check({"das": {"drafter": "none", "history": {"load": "x"}}}) is None
    keyed = {"drafter": "none", "verify": {"noise": "keyed"}}
    assert nemo_rl.check(
        {"das": keyed, "vllm_cfg": {"pipeline_parallel_size": 2}}
    ) == parse(keyed)


@pytest.mark.parametrize(
    ("experts", "tensor", "ranks"), [(8, 2, 4), (2, 2, 1), (1, 4, 1), (None, None, 1)]
)
def test_nemo_rls_workers_that_share_experts_are_ranks_of_one_engine(
    experts: Any, tensor: Any, ranks: int
) -> None:
    sizes = {"expert_parallel_size": experts, "tensor_parallel_size": tensor}
    assert nemo_rl.data_parallel_size({"vllm_cfg": sizes}) == ranks


class MasterConfig(BaseModel, extra="allow"):
    """As NeMo-RL's."""

    policy: dict[str, Any]


@pytest.mark.parametrize("block_there", [False, True])
@pytest.mark.parametrize(
    "place",
    """das custom.das rollout.custom.das actor_rollout_ref.das actor_rollout_ref.custom.das
    actor_rollout_ref.rollout.das actor_rollout_ref.rollout.engine_kwargs.vllm.das
    policy.das policy.generation.vllm_kwargs.das""".split(),
)
def test_a_block_in_a_wrong_place_of_a_hosts_config_is_refused_with_the_right_one(
    place: str, block_there: bool, any_host: None
) -> None:
    found = f"{place}: found a block in a place where it has no effect; write it to "
    config = under_verl({} if block_there else None)
    OmegaConf.update(config, place, {"drafter": "history"}, force_add=True)
    with pytest.raises(ConfigError, match=re.escape(f"{found}{verl.BLOCK}")):
        verl.check(config)
    generation = {"backend": "vllm", **({"das": {}} if block_there else {})}
    theirs = OmegaConf.create({"policy": {"generation": generation}})
    OmegaConf.update(theirs, place, {"drafter": "history"}, force_add=True)
    with pytest.raises(ConfigError, match=re.escape(f"{found}{nemo_rl.BLOCK}")):
        checkpoint.begin(MasterConfig(**OmegaConf.to_container(theirs)), None)


def test_a_block_elsewhere_to_which_the_right_place_refers_is_taken(
    any_host: None,
) -> None:
    for elsewhere in ("das", "mine.das"):
        config = under_verl({})
        OmegaConf.update(
            config,
            elsewhere,
            {"drafter": "history", "verify": {"seed": "${number}"}},
            force_add=True,
        )
        config.number = 3
        config.absent = "${nowhere}"
        config.required = "???"
        config.data = {"gone": {"a": 1}}
        config = OmegaConf.merge(config, {"data": {"gone": None}})
        config.actor_rollout_ref.rollout.custom.das = f"${{{elsewhere}}}"
        assert verl.check(config) == parse(
            {"drafter": "history", "verify": {"seed": 3}}
        )


def test_what_else_is_called_das_is_no_block(any_host: None) -> None:
    config = under_verl()
    config.data = {
        "das": "a set of data",
        "more": [{"das": {}}],
        "das_column": {"das": None},
    }
    config.actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config = {
        "das": {"theirs": 1}
    }
    assert verl.check(config) is None


def test_relative_directories_of_a_block_are_the_drivers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, any_host: None
) -> None:
    pytest.importorskip("ray")
    manager = SimpleNamespace(get_latest_checkpoint_path=lambda: None)
    monkeypatch.setitem(
        sys.modules,
        "nemo_rl.utils.checkpoint",
        SimpleNamespace(CheckpointManager=lambda _: manager),
    )
    (tmp_path / "saved").mkdir()
    monkeypatch.chdir(tmp_path)
    config = under_verl({"log_dir": "logs", "history": {"load": "saved"}})
    OmegaConf.set_struct(config, True)
    hooks.check_at_start.replacement(lambda config: None)(config)
    generation: dict[str, Any] = {
        "das": {"log_dir": "logs", "history": {"load": False}}
    }
    checkpoint.begin(
        SimpleNamespace(policy={"generation": generation}, checkpointing={}), None
    )
    monkeypatch.chdir("/")
    for found, load in (
        (verl.of_run(config), f"{tmp_path}/saved"),
        (nemo_rl.of_generation(generation), False),
    ):
        assert found is not None and (found.log_dir, found.history.load) == (
            f"{tmp_path}/logs",
            load,
        )


def blocks(node: Any) -> Iterator[dict[str, Any]]:
    """Every `das:` block of a YAML file."""
    for key, value in node.items() if isinstance(node, dict) else []:
        if key == "das" and isinstance(value, dict):
            yield value
        else:
            yield from blocks(value)


SHIPPED = [
    (path.relative_to(ROOT), found)
    for path in sorted(
        [*ROOT.glob("configs/**/*.yaml"), *ROOT.glob("examples/**/*.yaml")]
    )
    for found in blocks(OmegaConf.to_container(OmegaConf.load(path)))
]


@pytest.mark.parametrize(
    ("path", "found"),
    SHIPPED,
    ids=lambda value: str(value) if isinstance(value, Path) else "",
)
def test_shipped_blocks_are_right_and_off_in_one_line(
    path: Path, found: dict[str, Any]
) -> None:
    assert parse(found) is not None
    assert parse({**found, "drafter": "none"}) is None


def test_a_recipe_says_how_many_of_its_prompts_come_back() -> None:
    path = ROOT / "configs/nemo_rl/recipes/grpo-qwen3-1.7b-1n8g-megatron-das.yaml"
    said = re.search(
        r"about ([\d,]+) problems, each (\d+) times, .*?(\d+) % of the prompts",
        path.read_text(),
        re.S,
    )
    problems, times, share = (int(number.replace(",", "")) for number in said.groups())
    grpo = OmegaConf.load(path).grpo
    prompts = grpo.max_num_steps * grpo.num_prompts_per_step
    assert "max_num_epochs" not in grpo and prompts < problems * times
    first = problems * (1 - (1 - 1 / problems) ** prompts)
    assert round(100 * (1 - first / prompts)) == share


def test_there_are_shipped_blocks_of_both_hosts() -> None:
    assert {path.parts[:2] for path, _ in SHIPPED} == {
        ("configs", "nemo_rl"),
        ("examples", "nemo_rl"),
        ("examples", "verl"),
    }


def test_pages_have_the_tables_of_keys_that_the_models_give() -> None:
    for page in reference.PAGES:
        assert reference.update(page) == page.read_text(), (
            "run python scripts/reference.py"
        )


def test_every_key_is_documented() -> None:
    for models in reference.PAGES.values():
        assert all(
            field.description
            for prefix, model in models
            for _, field in reference.keys(model, prefix)
        )
    for key, field in reference.keys(DasConfig):
        optional = field.get_default(call_default_factory=True) is None
        assert ("None:" in field.description) == optional, key


@pytest.mark.parametrize("below", ["", "new", "new/runs"])
def test_a_log_dir_that_this_user_may_not_write_to_is_found(
    tmp_path: Path, below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere: the kernel's answer is put in its place."""
    asked = []

    def access(path: Path, mode: int) -> bool:
        asked.append((path, mode))
        return False

    directory = str(tmp_path / below)
    assert unwritable(directory) is None
    monkeypatch.setattr(os, "access", access)
    assert unwritable(directory) == tmp_path
    assert asked == [(tmp_path, os.W_OK | os.X_OK)]
