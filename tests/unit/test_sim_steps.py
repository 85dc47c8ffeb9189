"""What simulated steps take: rooflines, lines, and the passes of models that draft."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from das_adapter.core.hardware import DEVICES, device
from das_adapter.core.latency import StepModel
from das_adapter.core.policy import DraftPolicy
from das_adapter.core.roofline import Roofline
from das_adapter.errors import DasError
from das_adapter.sim import Simulation
from das_adapter.sim.config import parse
from das_adapter.sim.controlled import Controlled
from das_adapter.sim.models import sizes
from das_adapter.sim.simulate import rate_of
from das_adapter.sim.steps import Instance, instance

LINE = {"base": 0.01, "token": 1e-4, "draft": 0.0}
OFF: dict[str, Any] = {"das": {"drafter": "none"}}
ROLLOUT: dict[str, Any] = {
    "problems": 6,
    "samples": 4,
    "dataset": 12,
    "cap": 300,
    "prompt": 20,
    "lengths": {"mean": 80},
}


def simulated(**keys: Any) -> Simulation:
    return Simulation(
        parse(
            {"rollout": ROLLOUT, "arms": {"off": OFF}, "hardware": {"gpus": 2}} | keys
        )
    )


@pytest.mark.parametrize(
    ("model", "billions", "active"),
    [("Qwen/Qwen3-235B-A22B", 235, 22), ("Qwen/Qwen3-8B", 8.2, 8.2)],
)
def test_a_model_s_sizes_give_its_parameters(
    model: str, billions: float, active: float
) -> None:
    roof = Roofline.from_config(sizes(model), DEVICES["h100"])
    assert (
        roof.weight_bytes + roof.table_bytes + roof.expert_bytes
    ) / 2e9 == pytest.approx(billions, rel=0.01)
    embedding = sizes(model)["hidden_size"] * sizes(model)["vocab_size"]
    assert (roof.dense_flops / 2 + embedding) / 1e9 == pytest.approx(active, rel=0.02)


def test_a_model_whose_layers_the_roofline_does_not_know_is_refused() -> None:
    plain = {
        key: value
        for key, value in sizes("Qwen/Qwen2.5-7B").items()
        if key != "head_dim"
    }
    for keys in (
        {},
        {"model_type": "qwen2"},
        {"kv_lora_rank": None},
        {"num_local_experts": 8, "num_experts_per_tok": 2},
    ):
        assert (
            Roofline.from_config(sizes(plain | keys), DEVICES["h100"]).weight_bytes
            > 1e9
        )
    for keys, message in (
        (
            {"model_type": "deepseek_v3"},
            (
                "model: found model_type='deepseek_v3', allowed: llama, mistral, .* or"
                " none"
            ),
        ),
        ({"kv_lora_rank": 512}, "model: found kv_lora_rank=512, allowed: none"),
        ({"n_routed_experts": 256}, "model: found n_routed_experts=256, allowed: none"),
        ({"num_local_experts": 8}, "model: lacks num_experts_per_tok"),
    ):
        with pytest.raises(DasError, match=message):
            simulated(model=plain | keys)


def test_a_step_of_experts_reads_those_that_its_tokens_choose() -> None:
    roof = Roofline.from_config(sizes("Qwen/Qwen3-30B-A3B"), DEVICES["h100"])
    read = roof.weights_s([1, 16, 10000]) * roof.hardware.bandwidth
    assert read[0] == pytest.approx(roof.weight_bytes + roof.expert_bytes * 8 / 128)
    assert (
        read[0]
        < read[1]
        < read[2]
        == pytest.approx(roof.weight_bytes + roof.expert_bytes)
    )
    half = Roofline.from_config(
        sizes("Qwen/Qwen3-30B-A3B"), DEVICES["h100"], bytes_per_weight=1.0
    )
    assert half.expert_bytes == roof.expert_bytes / 2 and half.kv_bytes == roof.kv_bytes


def test_what_devices_exchange_takes_its_time_beside_the_kernels() -> None:
    engine = instance(sizes("Qwen/Qwen3-8B"), device("gb200"), 8, "fp8")
    many = np.array([1024.0])
    exchange = engine.waits_s + engine.token_s * 6 * 1024
    kernels = float(engine.roof.seconds(1024, 4000, 5))
    assert engine.decode(many, 6 * many, 4000 * many) == pytest.approx(
        kernels + exchange
    )
    assert exchange - engine.waits_s > 0.2 * kernels


@pytest.mark.parametrize(
    ("drafter", "share"), [("eagle3", 1 / 28), ("mtp", 1 / 28), ("draft_model", 0.1)]
)
def test_a_neural_drafter_reads_a_context_of_its_own(
    drafter: str, share: float
) -> None:
    simulation = simulated(
        model="Qwen/Qwen2.5-7B", steps={"kind": "roofline", "pass_overhead_ms": 0.5}
    )
    b = np.array([8.0, 64.0])
    none = np.zeros(2)
    plain = simulation.steps.decode
    read = plain(b, b, 5000 * b) - plain(b, b, none)
    expected = 0.5e-3 + 0.1 * plain(b, b, none) + share * read
    assert simulation.steps.neural_pass(0.1, drafter)(b, 5000 * b) == pytest.approx(
        expected
    )


def test_a_line_is_simulated_as_it_is() -> None:
    line = {"base": 0.01, "token": 1e-4, "context": 1e-7}
    model = StepModel(**line)
    arms = {"off": OFF, "self": {"das": {"drafter": "self"}}}
    simulation = simulated(steps={"kind": "line", "line": line}, arms=arms)
    b = np.array([4.0, 16.0])
    assert simulation.steps.decode(b, 4 * b, 100 * b) == pytest.approx(
        model.seconds(4 * b, b, True, 100 * b)
    )
    off, ours = (
        sum(step.rollout_s for step in simulation.run(arm).steps)
        for arm in ("off", "self")
    )
    plain = model.seconds(b, b, False, 100 * b)
    assert simulation.steps.copy_pass(b, 100 * b) == pytest.approx(0.4 * plain)
    assert ours < 1.05 * off
    assert simulation.steps.neural_pass(None, "eagle3")(b, 100 * b) == pytest.approx(
        0.05 * plain
    )
    half = simulation.steps.neural_pass(0.5, "eagle3")(b, 100 * b)
    assert half == pytest.approx(0.5 * simulation.steps.decode(b, b, 100 * b))


@pytest.mark.parametrize(
    ("weights", "precision", "share"),
    [("int4", "bf16", 0.25), ("int8", "bf16", 0.5), ("fp8", "fp8", 1.0)],
)
def test_a_policy_copy_has_the_bytes_of_its_format(
    weights: str, precision: str, share: float
) -> None:
    das = {"drafter": "self", "self": {"weights": weights}}
    simulation = simulated(
        steps={"kind": "roofline"}, precision=precision, arms={"a": {"das": das}}
    )
    passes = simulation.fleet("a")[0].drafting.pass_seconds
    b = np.ones(1)
    assert isinstance(simulation.steps, Instance) and passes is not None
    expected = (
        simulation.steps.roof.seconds(1, 100, 0, share)
        + simulation.steps.pass_overhead_s
    )
    assert passes(b, 100 * b)[0] == pytest.approx(expected)


def controllers(simulation: Simulation, arm: str = "a") -> list[DraftPolicy]:
    found = simulation.fleet(arm)[0].drafting
    assert isinstance(found, Controlled)
    return found.policies


def test_the_rate_of_a_draft_gives_its_length() -> None:
    assert sum(rate_of(2.77, 3) ** i for i in range(4)) == pytest.approx(2.77)
    with pytest.raises(DasError, match="1 to under 4"):
        rate_of(4.2, 3)


def test_controllers_know_before_the_first_step_what_those_of_a_run_know() -> None:
    line = {"kind": "line", "line": LINE}
    assert not controllers(simulated(steps=line, arms={"a": {}}))[
        0
    ].latency.known  # steps that belong to no GPU
    arms = {"a": {}, "b": {"das": {"speculate": 32}}}
    of_gpu = simulated(steps={"kind": "roofline"}, model="Qwen/Qwen2.5-7B", arms=arms)
    begin = Roofline.from_config(sizes("Qwen/Qwen2.5-7B"), DEVICES["h100"])
    assert controllers(of_gpu)[0].latency.model == begin.step_model()
    assert not controllers(of_gpu, "b")[0].latency.known
