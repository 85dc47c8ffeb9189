"""`das-adapter config`: the shipped configs, and what the hosts themselves would
refuse.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from das_adapter import compat
from das_adapter.cli import main
from das_adapter.config import NEEDS, DasConfig, parse
from das_adapter.engine.settings import prepare_standalone
from das_adapter.errors import ConfigError
from das_adapter.reports import configs

ROOT = Path(__file__).resolve().parents[2]
BLOCKS: list[dict[str, Any]] = [
    {},
    {"drafter": "none", "verify": {"noise": "keyed", "seed": 3}},
    {"drafter": "self", "self": {"weights": "int8"}},
    {"drafter": "history+self", "history": {"scope": "request"}},
    {"drafter": "ngram", "max_draft_tokens": 4},
    {
        "drafter": "eagle3",
        "draft": {"model": "drafter"},
        "budget": "unlimited",
        "speculate": "always",
    },
    {"drafter": "history+mtp", "verify": {"noise": "stock"}},
]


def shown(*words: object) -> dict[str, Any]:
    done = CliRunner().invoke(main, ["config", *map(str, words), "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_the_effective_block_is_the_same_block_with_every_key_that_has_an_effect(
    block: dict[str, Any],
) -> None:
    das = parse(block)
    whole = configs.effective(das)
    again = parse(whole)
    assert again is not None and configs.effective(again) == whole
    for key in (
        "drafter",
        "keyed",
        "num_draft_tokens",
        "model_tokens",
        "controlled",
        "looked_up",
        "saves_history",
    ):
        assert getattr(again, key) == getattr(das, key), key
    blocks = {key.partition(".")[0] for key in NEEDS}
    assert whole.keys() >= DasConfig.model_fields.keys() - blocks, (
        "every other key is filled in"
    )
    assert ("self" in whole) == das.copies_policy and ("draft" in whole) == das.neural
    assert ("history" in whole) == das.uses_history


def test_a_block_alone_is_shown_and_what_is_wrong_with_one_is_said(
    tmp_path: Path,
) -> None:
    path = tmp_path / "das.yaml"
    path.write_text("das: {drafter: history, history: {max_bytes: 512MiB}}\n")
    found = shown(path)
    assert found["host"] is None and found["das"]["history"]["max_bytes"] == 512 * 2**20
    assert (
        found["das"]["max_draft_tokens"] == 32
        and found["das"]["verify"]["noise"] == "keyed"
    )
    assert found["runs"]["history"].startswith("written by one process on each node")
    done = CliRunner().invoke(main, ["config", str(path)], terminal_width=200)
    assert (
        yaml.safe_load(done.output.partition("what ")[0])["das"]["drafter"] == "history"
    )
    for text, words in (
        ("drafter: histroy", "das.drafter: found 'histroy'"),
        (
            "self: {weights: int8}",
            "das.self.weights='int8' has an effect only with das.drafter",
        ),
        ("history: {load: nowhere}", "das.history.load: found 'nowhere'"),
        (f"log_dir: {path}/logs", "das.log_dir: found"),
        ("[1, 2]", "expected a das: block"),
        ("{", "das.yaml"),
    ):
        path.write_text(text)
        done = CliRunner().invoke(main, ["config", str(path)])
        assert done.exit_code == 1 and words in " ".join(done.output.split()), (
            done.output
        )


@pytest.mark.parametrize("key", ["run_ahead", "load"])
def test_what_only_a_host_can_do_is_shown_for_a_block_alone(
    key: str, tmp_path: Path
) -> None:
    path = tmp_path / "das.yaml"
    value = {"run_ahead": "auto", "load": str(tmp_path)}[key]
    path.write_text(yaml.safe_dump({"history": {key: value}}))
    said = shown(path)["runs"]["without a host"]
    assert said.startswith(f"refused: das.history.{key}: found {value!r}, allowed: ")
    das = parse({"history": {key: value}})
    assert das is not None and "without a host" not in configs.placement(
        das, "veRL", {}
    )
    with pytest.raises(ConfigError) as refused:
        prepare_standalone(
            SimpleNamespace(additional_config={}, speculative_config=None), das
        )
    assert said == f"refused: {refused.value}"
    path.write_text("history: {load: false}\n")
    assert "without a host" not in shown(path)["runs"]


def test_a_check_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "das.yaml"
    path.write_text(f"log_dir: {tmp_path}/new/logs\n")
    done = CliRunner().invoke(main, ["config", str(path)])
    assert done.exit_code == 0, done.output
    assert os.listdir(tmp_path) == ["das.yaml"]


def test_none_leaves_vllm_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "das.yaml"
    path.write_text("drafter: none\n")
    assert shown(path) == {
        "host": None,
        "das": None,
        "runs": {"engines": "vLLM as it is: nothing of das-adapter runs"},
    }


VERL = ROOT / "examples" / "verl" / "grpo_qwen2_5_7b_gsm8k.yaml"
DAS = "actor_rollout_ref.rollout.custom.das"


def test_a_verl_config_is_composed_and_checked_as_verl_does(tmp_path: Path) -> None:
    pytest.importorskip("verl")
    found = shown(VERL)
    assert found["host"] == "veRL" and found["das"]["drafter"] == "history"
    assert found["runs"]["routing"] == "longest_first, by das-adapter's load balancer"
    assert shown(VERL, f"{DAS}.drafter=self")["das"]["self"] == {"weights": "int4"}
    for override, words in (
        ("actor_rollout_ref.rollout.name=sglang", "allowed: 'vllm'"),
        ("no.such.key=1", "no.such.key"),
        (
            "actor_rollout_ref.rollout=3",
            (
                "actor_rollout_ref.rollout: found 3, expected the config of veRL's"
                " rollouts"
            ),
        ),
        (
            "++actor_rollout_ref.rollout.engine_kwargs.vllm=3",
            "engine_kwargs.vllm: found 3, expected a mapping",
        ),
    ):
        done = CliRunner().invoke(main, ["config", str(VERL), override])
        assert done.exit_code == 1 and words in " ".join(done.output.split()), (
            done.output
        )
    path = tmp_path / "run.yaml"
    path.write_text(
        "hydra: {searchpath: [pkg://verl.trainer.config]}\ndefaults: [ppo_trainer,"
        " _self_]\ndas: {}\n"
    )
    done = CliRunner().invoke(main, ["config", str(path)])
    words = f"das: found a block in a place where it has no effect; write it to {DAS}"
    assert done.exit_code == 1 and words in " ".join(done.output.split())


def test_a_verl_run_without_plug_ins_is_refused_where_it_has_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("verl")
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    done = CliRunner().invoke(main, ["config", str(VERL)])
    assert (
        done.exit_code == 1
        and "VERL_USE_EXTERNAL_PLUGINS: found 'none'" in " ".join(done.output.split())
    )
    assert shown(VERL, f"{DAS}.drafter=none")["das"] is None


def test_a_value_that_the_hosts_command_line_sets_may_follow_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verl")
    monkeypatch.delenv("RUN_DIR", raising=False)
    path = tmp_path / "run.yaml"
    rollout = {"name": "???", "custom": {"das": {"log_dir": "${oc.env:RUN_DIR}"}}}
    composed = {
        "hydra": {"searchpath": ["pkg://verl.trainer.config"]},
        "defaults": ["ppo_trainer", "_self_"],
    }
    path.write_text(
        yaml.safe_dump({**composed, "actor_rollout_ref": {"rollout": rollout}})
    )
    given = [f"{DAS}.log_dir={tmp_path}", "actor_rollout_ref.rollout.name=vllm"]
    for overrides, words in (
        (given[1:], "RUN_DIR"),
        (given[:1], "Missing mandatory value: actor_rollout_ref.rollout"),
    ):
        done = CliRunner().invoke(main, ["config", str(path), *overrides])
        said = " ".join(done.output.split())
        assert (
            done.exit_code == 1
            and words in said
            and "overrides of the host's command line may follow" in said
        )
    assert shown(path, *given)["das"]["log_dir"] == str(tmp_path)


def test_a_nemo_rl_config_is_not_guessed_at_without_nemo_rl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nemo_rl.utils.config", None)
    with pytest.raises(ConfigError, match="which NeMo-RL's own code reads"):
        configs.load(ROOT / "configs/nemo_rl/das.yaml")


@pytest.mark.parametrize(
    "recipe",
    sorted((ROOT / "configs/nemo_rl/recipes").glob("*.yaml")),
    ids=lambda p: p.stem,
)
def test_a_nemo_rl_config_is_merged_and_checked_as_nemo_rl_does(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "put a checkout of NVIDIA-NeMo/RL on PYTHONPATH"
    # engines of other tests in this process may have chosen V1
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.setenv(
        "NEMO_RL_DIR",
        str(Path(pytest.importorskip("nemo_rl", reason=reason).__file__).parents[1]),
    )
    found = shown(recipe, "+policy.generation.das.max_draft_tokens=4")
    assert found["host"] == "NeMo-RL"
    assert (found["das"]["drafter"], found["das"]["max_draft_tokens"]) == ("history", 4)
    assert found["runs"]["routing"].endswith("das-adapter's generation class")
    shared = shown(recipe, "++policy.generation.vllm_cfg.expert_parallel_size=8")[
        "runs"
    ]["routing"]
    assert shared == "NeMo-RL's own: workers that share experts step together"
    assert shown(recipe, "policy.generation.das.drafter=none")["das"] is None
    for override, words in (
        (
            "policy.generation.backend=sglang",
            "policy.generation.backend='sglang' beside it, allowed: 'vllm'",
        ),
        (
            "++policy.generation.vllm_kwargs.speculative_config.method=ngram",
            "both choose a drafter",
        ),
        (
            "+das.drafter=self",
            "where it has no effect; write it to policy.generation.das",
        ),
        ("no.such.key=1", "no.such.key"),
        (
            "policy.generation.vllm_kwargs=3",
            "policy.generation.vllm_kwargs: found 3, expected a mapping",
        ),
    ):
        done = CliRunner().invoke(main, ["config", str(recipe), override])
        assert done.exit_code == 1 and words in " ".join(done.output.split()), (
            done.output
        )
    monkeypatch.setenv("NEMO_RL_DIR", "/none")
    done = CliRunner().invoke(main, ["config", str(recipe)])
    assert done.exit_code == 1 and "/none/examples" in "".join(done.output.split())
    monkeypatch.delenv("NO_SUCH_DIR", raising=False)
    path = tmp_path / "run.yaml"
    path.write_text("defaults: ${oc.env:NO_SUCH_DIR}/base.yaml\n")
    done = CliRunner().invoke(main, ["config", str(path)])
    assert done.exit_code == 1 and "'NO_SUCH_DIR' not found" in " ".join(
        done.output.split()
    ), done.output


def test_the_runner_is_the_engines_own_choice_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    das = parse({})
    if compat.version("vllm") is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        assert configs.placement(das, None, {})["model runner"].startswith("V1: ")
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    monkeypatch.setattr(compat, "version", lambda host: "0.31.0")
    monkeypatch.setattr(compat, "missing", lambda host: [])
    runs = configs.placement(das, None, {})
    assert runs["model runner"].startswith("V2") and runs["drafts"].endswith(
        "for all requests of a step: 0, 1, 2, 4, 8, 16, 32"
    )
    runs = configs.placement(das, "veRL", {}, triton=False)
    assert runs["model runner"].startswith("V1: ")
    assert (
        runs["drafts"]
        == "up to 32 tokens, each request its own number; texts are searched on the"
        " host"
    )
    monkeypatch.setattr(compat, "version", lambda host: None)
    assert "for lack of vLLM" in configs.placement(das, None, {})["model runner"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            [f"{DAS}.drafter=self", "actor_rollout_ref.model.lora_rank=32"],
            "das.drafter='self' does not work with LoRA adapters",
        ),
        (
            [
                f"{DAS}.drafter=history",
                "++actor_rollout_ref.rollout.engine_kwargs.vllm.pipeline_parallel_size=2",
            ],
            "das.drafter='history' does not work with pipeline_parallel_size=2",
        ),
        (
            [
                f"{DAS}.drafter=self",
                "actor_rollout_ref.rollout.expert_parallel_size=2",
                "actor_rollout_ref.rollout.data_parallel_size=2",
            ],
            "das.drafter='self' does not work with experts over data_parallel_size=2",
        ),
    ],
)
def test_what_the_engines_of_a_verl_run_would_refuse_is_refused(
    overrides: list[str], words: str
) -> None:
    pytest.importorskip("verl")
    done = CliRunner().invoke(main, ["config", str(VERL), *overrides])
    assert done.exit_code == 1 and words in " ".join(done.output.split()), done.output


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        ({"num_experts": 128}, {"data_parallel_size": 2}, "experts over data_paral"),
        ({}, {"data_parallel_size": 2}, ""),
        ({}, {"enable_lora": True}, "LoRA adapters"),
        ({}, {"enable_eplb": True}, "enable_eplb=True"),
        ({}, {"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({}, {"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2"),
        (
            {"text_config": {"rope_scaling": {"mrope_section": [16, 24, 24]}}},
            {},
            "rotary positions",
        ),
    ],
)
def test_a_policys_own_config_tells_what_its_copy_does_not_work_with(
    content: dict[str, Any], arguments: dict[str, Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    das = parse({"drafter": "self"})
    if not words:
        assert configs.with_policy(das, str(tmp_path), arguments) == (das, "")
        return
    with pytest.raises(ConfigError, match=f"does not work with .*{words}"):
        configs.with_policy(das, str(tmp_path), arguments)


def test_where_a_policys_config_is_not_here_the_output_says_what_is_not_known() -> None:
    of_copy = configs.with_policy(parse({"drafter": "self"}), "nobody/nothing", {})[1]
    of_history = configs.with_policy(parse({}), "nobody/nothing", {})[1]
    assert "the config.json of nobody/nothing is not here" in of_history
    assert "experts over data-parallel ranks" in of_copy
    assert "experts" not in of_history


@pytest.mark.parametrize(
    ("text", "words", "trl"),
    [
        (
            "model_name_or_path: Qwen/Qwen2.5-7B\nseed: 42\nlora: {r: 16}\n",
            "found the keys model_name_or_path, seed, lora, which are no das: block",
            True,
        ),
        ("tools:\n- class_name: x\n", "found the keys tools, which are no das:", False),
        ("drafer: history\n", "das.drafer: unknown key; did you mean 'drafter'", False),
    ],
)
def test_another_yaml_is_no_block_with_wrong_keys(
    text: str, words: str, trl: bool, tmp_path: Path
) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(text)
    done = CliRunner().invoke(main, ["config", str(path)])
    said = " ".join(done.output.split())
    assert done.exit_code == 1 and words in said, said
    assert ("training config of TRL" in said) == trl


def test_a_block_alone_shows_no_key_that_only_a_host_heeds(tmp_path: Path) -> None:
    path = tmp_path / "das.yaml"
    path.write_text("drafter: history\n")
    found = shown(path)
    assert "routing" not in found["das"] and "routing" not in found["runs"]
    assert {"run_ahead", "load"}.isdisjoint(found["das"]["history"])
    assert "routing, run-ahead and histories in checkpoints" in found["runs"]["host"]
    path.write_text("routing: least_loaded\n")
    assert shown(path)["das"]["routing"] == "least_loaded"


@pytest.mark.parametrize("content", [b"\xff\xfe\x00\x01", b"a: [1\n", b"\x00"])
def test_a_file_that_is_no_yaml_is_named_in_one_line(
    content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "das.yaml"
    path.write_bytes(content)
    done = CliRunner().invoke(main, ["config", str(path)])
    assert done.exit_code == 1 and len(done.output.splitlines()) == 1, done.output
    assert "it is no " in done.output and "codec" not in done.output
