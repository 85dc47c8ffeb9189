"""The history in checkpoints that NeMo-RL's own `CheckpointManager` writes, completes
and removes, under real Ray.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_nemo_rl_workers import RECIPES, Engine, composed, refreshed, written

ray = pytest.importorskip("ray")
from nemo_rl.utils.checkpoint import CheckpointManager  # noqa: E402
from vllm import SamplingParams  # noqa: E402

from das_adapter.core.index.store import HistoryStore  # noqa: E402
from das_adapter.core.length import RESPONSE  # noqa: E402
from das_adapter.errors import ConfigError, DasError  # noqa: E402
from das_adapter.nemo_rl import checkpoint, install, settings  # noqa: E402
from das_adapter.nemo_rl.engine_hooks import SyncEngineHooks  # noqa: E402
from das_adapter.protocol.label import Label  # noqa: E402
from das_adapter.service import checkpoint as saved  # noqa: E402
from das_adapter.service.ledger import find_actor, history_names  # noqa: E402

TOKENIZER = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1})
OTHER = SimpleNamespace(get_vocab=lambda: {"b": 0, "a": 1})
REFIT = "update_weights_via_ipc_zmq"
OFF = {"drafter": "history", "history": {"load": False}}
Make = Callable[..., Any]
Run = Callable[[Any], AbstractContextManager[Engine]]


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    """A recipe's config, as a run that starts reads it."""
    install.install()

    def make(directory: str = "checkpoints", **history: Any) -> Any:
        config = composed(RECIPES[0], monkeypatch)
        config.checkpointing |= {
            "checkpoint_dir": str(tmp_path / directory),
            "keep_top_k": 1,
            "metric_name": None,
        }
        das = {"drafter": "history", "history": {"max_bytes": "64MiB", **history}}
        config.policy["generation"]["das"] = das
        config.policy["generation"]["vllm_kwargs"]["additional_config"]["das"] = das
        return config

    return make


@pytest.fixture
def run(ray_address: str) -> Run:
    """A run of a config with one engine, after the first weight sync."""

    @contextmanager
    def run(config: Any) -> Iterator[Engine]:
        ray.init(ray_address, log_to_driver=False)
        try:
            checkpoint.begin(config, TOKENIZER)
            generation = config.policy["generation"]
            engine = Engine()
            das = settings.of_generation(generation)
            SyncEngineHooks(
                engine, das, source="1", resumed=generation[settings.STEP]
            ).start()
            engine.collective_rpc(REFIT)
            yield engine
        finally:
            ray.shutdown()

    return run


def write(engine: Engine, count: int) -> None:
    """Let the engine finish responses of three tokens, each to a problem of its own."""
    engine.generate(
        [{"prompt_token_ids": [1, i]} for i in range(count)], [SamplingParams()] * count
    )


def save(config: Any, step: int) -> Path:
    """Save a checkpoint as NeMo-RL's trainers do; return its directory."""
    manager = CheckpointManager(config.checkpointing)
    temporary = Path(manager.init_tmp_checkpoint(step, {}, config))
    assert temporary.name == f"tmp_step_{step}"
    manager.begin_finalization(temporary)
    manager.shutdown()
    return temporary.with_name(f"step_{step}")


def test_a_resumed_run_begins_with_the_history_of_its_checkpoint(
    config: Make, run: Run
) -> None:
    first = config()
    with run(first) as engine:
        write(engine, 2)
        engine.collective_rpc(REFIT)
        write(engine, 1)  # since the weight sync, just before the checkpoint
        seeds = [Label.of(params.extra_args).seed for params in engine.params]
        folder = save(first, 3)
    assert {path.name for path in (folder / saved.NAME).iterdir()} == {
        "index",
        "history.json",
        "lengths.npy",
        "prompts",
    }

    second = config()
    with run(second) as engine:
        assert second.policy["generation"][settings.STEP] == 3
        message = refreshed(engine)[0]
        assert message.history is not None and written(message.history) == 9
        assert sorted(message.responses["version"]) == [-1, -1, 0]
        write(engine, 2)
        # not drawn before
        assert not set(seeds) & {
            Label.of(params.extra_args).seed for params in engine.params
        }
        assert save(second, 4).is_dir()
    assert not folder.exists()  # NeMo-RL keeps so many


def test_another_run_starts_with_a_history_and_leaves_it_alone(
    config: Make, run: Run
) -> None:
    first = config()
    with run(first) as engine:
        write(engine, 2)
        folder = save(first, 3) / saved.NAME
    before = {
        path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    with run(config("elsewhere", load=str(folder))) as engine:
        message = refreshed(engine)[0]
        assert message.history is not None and written(message.history) == 6
    assert {
        path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()
    } == before


def history_of(folder: Path, tokenizer: Any) -> Path:
    """A directory that passes for the history of a checkpoint."""

    def empty(index: Path) -> int:
        with HistoryStore(folder.with_name("store")) as store:
            store.save(index / "0")
        return 1

    saved.write(
        folder, saved.facts_of("problem", tokenizer), np.zeros(0, RESPONSE), empty
    )
    return folder


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("grpo", "setup"),
        ("ppo", "setup"),
        ("distillation", "setup"),
        ("single_controller_utils.setup", "setup_single_controller"),
    ],
)
def test_every_algorithm_refuses_another_tokenizers_history_before_it_launches_anything(
    config: Make, tmp_path: Path, module: str, name: str
) -> None:
    setup = getattr(importlib.import_module(f"nemo_rl.algorithms.{module}"), name)
    nothing = [None] * (0 if name != "setup" else 2)
    other = history_of(tmp_path / "other", OTHER)
    words = (
        r"policy.generation.das.history.load: the history in '.*/other' was written"
        r" with tokenizer '\w+'"
    )
    with pytest.raises(DasError, match=words):
        setup(config(load=str(other)), TOKENIZER, *nothing)
    with pytest.raises(
        DasError, match=r"policy.generation.das.history.load: found no history in"
    ):
        setup(config(load=str(tmp_path)), TOKENIZER, *nothing)
    with pytest.raises(ConfigError, match=r"das.history.load: found '/nowhere'"):
        setup(config(load="/nowhere"), TOKENIZER, *nothing)
    assert not ray.is_initialized()


def test_where_no_figures_are_logged_the_log_says_so(config: Make, caplog: Any) -> None:
    for module, warned in (
        ("grpo", 0),
        ("ppo", 0),
        ("distillation", 1),
        ("single_controller_utils.setup", 1),
    ):
        caplog.clear()
        checkpoint.begin(config(load=False), TOKENIZER, f"nemo_rl.algorithms.{module}")
        assert caplog.text.count("das: no figures under das/ are logged") == warned, (
            module
        )


def test_a_history_that_cannot_be_saved_costs_the_checkpoint_nothing(
    config: Make, run: Run, caplog: Any
) -> None:
    broken = config()
    with run(broken) as engine:
        write(engine, 1)
        for name in history_names():
            ray.kill(find_actor(name), no_restart=True)
        folder = save(broken, 1)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.yaml",
        "training_info.json",
    ]
    assert caplog.text.count("das: the history was not saved with the checkpoint") == 1
    caplog.clear()
    with run(config()) as engine:
        assert not refreshed(engine)[0].lengths
    assert caplog.text.count("step_1 has no history to resume from") == 1


def test_without_an_active_block_checkpoints_are_stock(config: Make) -> None:
    for das in (
        {"drafter": "none"},
        {"drafter": "history", "history": {"scope": "request"}},
        OFF,
    ):
        stock = config()
        stock.policy["generation"]["das"] = stock.policy["generation"]["vllm_kwargs"][
            "additional_config"
        ]["das"] = das
        before = json.dumps(stock.model_dump(), default=str)
        checkpoint.begin(stock, TOKENIZER)
        if das["drafter"] == "none":
            assert json.dumps(stock.model_dump(), default=str) == before
        assert sorted(path.name for path in save(stock, 1).iterdir()) == [
            "config.yaml",
            "training_info.json",
        ]
    without = SimpleNamespace(policy=None, model_dump=dict)
    assert sorted(path.name for path in save_with(without, config()).iterdir()) == [
        "config.yaml",
        "training_info.json",
    ]


def save_with(run_config: Any, config: Any) -> Path:
    """A checkpoint of an algorithm that generates nothing."""
    return Path(
        CheckpointManager(config.checkpointing).init_tmp_checkpoint(2, {}, run_config)
    )


ELSEWHERE = """
import pickle
import das_adapter.cpu.nemo_rl_worker
from nemo_rl.utils.checkpoint import CheckpointManager
from das_adapter.nemo_rl.generation import DasVllmGeneration
generation = object.__new__(DasVllmGeneration)
generation.shutdown, generation.das = bool, None  # the first is called at the end
sent = pickle.dumps(generation)
print(hasattr(CheckpointManager.init_tmp_checkpoint, "__das_patch__"))
arrived = pickle.loads(sent)
print(hasattr(CheckpointManager.init_tmp_checkpoint, "__das_patch__"))
"""


def test_where_a_generation_arrives_by_pickle_checkpoints_have_the_history_as_well() -> (
    None
):
    """NeMo-RL's single controller is an actor, which gets the generation from the
    driver and writes the checkpoints.
    """
    out = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, check=True
    )
    assert out.stdout.split()[-2:] == ["False", "True"]
