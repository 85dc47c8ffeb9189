"""What das-adapter does with a drafter that vLLM has loaded."""

from __future__ import annotations

import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
import torch
from safetensors.torch import save_file
from transformers import DeepseekV3Config
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader import utils
from vllm.model_executor.models import deepseek_mtp
from vllm.model_executor.utils import replace_parameter

from das_adapter.config import parse
from das_adapter.engine import drafter_files
from das_adapter.engine.draft_weights import DraftWeights, keep_buffers_over_sleep
from das_adapter.engine.v1.worker import HostWorkerState


class OtherNames(torch.nn.Module):
    """As vLLM's GPT-2, EXAONE and Falcon, a model whose layers lie in `transformer`,
    not in `model`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.transformer = torch.nn.Linear(2, 2, bias=False)

    def load_weights(self, weights: Any) -> set[str]:
        return {
            name
            for name, weight in weights
            if self.get_parameter(name).data.copy_(weight) is not None
        }


def test_a_draft_model_of_any_family_takes_the_trainers_weights() -> None:
    drafter = OtherNames()
    config = parse(
        {
            "drafter": "draft_model",
            "draft": {"model": "a small one", "weights": "trainer"},
        }
    )
    weights = DraftWeights(
        SimpleNamespace(speculator=SimpleNamespace(model=drafter)), config
    )
    weights.follow_drafter()
    assert "brought no weight" in str(weights.refresh())
    drafter.load_weights([("transformer.weight", torch.ones(2, 2))])
    assert weights.refresh() is None and drafter.transformer.weight.sum() == 4


class Model(torch.nn.Module):
    """A model with these parts, which takes what it has of a stream, as vLLM's MTP
    drafters do.
    """

    def __init__(self, **parts: torch.nn.Module):
        super().__init__()
        self.after_loading = lambda: None
        for name, part in parts.items():
            self.add_module(name, part)

    def load_weights(self, weights: Any) -> set[str]:
        named = dict(self.named_parameters(remove_duplicate=False)) | dict(
            self.named_buffers()
        )
        loaded = {
            name
            for name, weight in weights
            if name in named and named[name].data.copy_(weight) is not None
        }
        self.after_loading()
        return loaded


def part(value: float) -> torch.nn.Linear:
    linear = torch.nn.Linear(2, 2, bias=False).requires_grad_(False)
    linear.weight.fill_(value)
    return linear


CHECKPOINT = {
    f"{name}.weight": torch.ones(2, 2)
    for name in ("embed_tokens", "lm_head", "layer", "mtp")
}
TRAINED = {name: 2 * weight for name, weight in CHECKPOINT.items()}
POLICYS = {name: weight for name, weight in TRAINED.items() if name != "mtp.weight"}


class Mla(MLAAttention):
    """Attention over latents: it computes with weights that it makes of `layer`, and
    not with those.
    """

    def __init__(self, layer: torch.nn.Linear):
        torch.nn.Module.__init__(self)
        self.layer = [layer]  # as vLLM's, which are another module's too

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        replace_parameter(self, "W_UV", self.layer[0].weight.T, prefer_copy=True)


class Mtp:
    """An engine whose MTP drafter shares the policy's embedding and output layer."""

    def __init__(
        self,
        checkpoint: Path,
        monkeypatch: pytest.MonkeyPatch,
        source: str,
        load_format: str = "auto",
        quantization: str | None = None,
        own_files: bool = False,
    ):
        monkeypatch.setattr(
            "vllm.config.set_current_vllm_config", lambda config: nullcontext()
        )
        self.policy = Model(embed_tokens=part(1), lm_head=part(1), layer=part(1))
        shared = {
            "embed_tokens": self.policy.embed_tokens,
            "lm_head": self.policy.lm_head,
        }
        self.drafter = Model(**shared, mtp=part(1))
        self.drafter.register_buffer("table", torch.ones(2), persistent=False)
        self.drafter.add_module("attention", Mla(self.drafter.mtp))
        self.drafter.attention.process_weights_after_loading(torch.float32)
        save_file(CHECKPOINT, checkpoint / "model.safetensors")
        model = SimpleNamespace(
            model=str(checkpoint),
            revision=None,
            quantization=quantization,
            dtype=torch.float32,
        )
        vars(model).update(
            is_moe=False,
            multimodal_config=None,
            word_embeddings_untied_by_checkpoint=False,
        )
        runner = SimpleNamespace(
            model=self.policy,
            drafter=SimpleNamespace(model=self.drafter),
            device=torch.device("cpu"),
            load_config=SimpleNamespace(load_format=load_format),
            vllm_config=SimpleNamespace(parallel_config=None),
            speculative_config=SimpleNamespace(draft_model_config=model),
        )
        monkeypatch.setattr(
            "vllm.config.get_current_vllm_config", lambda: runner.vllm_config
        )
        files = {"model": str(checkpoint)} if own_files else {}
        self.weights = DraftWeights(
            runner, parse({"drafter": "mtp", "draft": {"weights": source, **files}})
        )
        self.weights.follow_drafter()

    def sync(self, stream: dict[str, torch.Tensor]) -> str | None:
        """Send a stream to both models, as veRL does, and return the alarm."""
        for model in (self.policy, self.drafter):
            model.load_weights(stream.items())
        return self.weights.refresh()

    def values(self) -> list[float]:
        return [
            float(p.mean())
            for p in (*self.policy.parameters(), self.drafter.mtp.weight)
        ]


@pytest.fixture
def mtp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda *args, **more: Mtp(tmp_path, monkeypatch, *args, **more)


def test_a_checkpoint_that_is_read_again_leaves_the_policy_as_it_is(mtp: Any) -> None:
    """vLLM has MTP drafters share the policy's embedding and output layer, of which
    their checkpoint has the first.
    """
    engine = mtp("checkpoint")
    before = [p.data_ptr() for p in engine.drafter.parameters()]
    engine.drafter.mtp.weight.zero_()  # as after sleep
    assert engine.sync(POLICYS) is None
    assert engine.values() == [2, 2, 2, 1]
    assert [p.data_ptr() for p in engine.drafter.parameters()] == before


def test_layers_for_mtp_that_were_to_come_from_the_checkpoint_are_named_and_not_kept(
    mtp: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = mtp("checkpoint")
    for _ in range(2):
        assert "sends the drafter's weights too (mtp.weight, ...)" in str(
            engine.sync(TRAINED)
        )
        assert engine.values() == [2, 2, 2, 1]
    assert caplog.text.count("reading its checkpoint again") == 1


def test_a_sync_without_layers_for_mtp_is_named(mtp: Any) -> None:
    engine = mtp("trainer")
    assert (
        "brought no weight of the drafter (names as in the policy's checkpoint)"
        in str(engine.sync(POLICYS))
    )
    assert engine.sync(TRAINED) is None
    assert engine.values() == [2, 2, 2, 2]


def test_what_a_drafter_makes_of_its_weights_is_made_again_with_them(
    mtp: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = mtp("checkpoint", "dummy")
    made = engine.drafter.attention.W_UV
    for _ in range(2):
        engine.drafter.mtp.weight.zero_()
        made.data.zero_()
        assert engine.sync(POLICYS) is None
        assert engine.drafter.attention.W_UV is made and made.eq(1).all()
    assert engine.sync(POLICYS) is None
    assert caplog.text.count("reading its checkpoint again") == 2


class Swap(QuantizeMethodBase):
    """Swaps the rows of a weight, as vLLM does those of experts for some kernels: twice
    undoes it.
    """

    def create_weights(self, *_: Any, **__: Any) -> None: ...

    def apply(self, *_: Any, **__: Any) -> Any: ...

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.weight.data.copy_(layer.weight.flip(0))


def test_hosts_process_only_what_a_sync_has_brought(
    mtp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both do so after a sync, in the policy and in the drafter."""

    def synced(engine: Mtp, stream: dict[str, torch.Tensor]) -> list[float]:
        for model in (engine.policy, engine.drafter):
            model.load_weights(stream.items())
            described: Any = SimpleNamespace(
                dtype=torch.float32,
                quantization=None,
                word_embeddings_untied_by_checkpoint=False,
            )
            utils.process_weights_after_loading(model, described, torch.device("cpu"))
        assert engine.weights.refresh() is None
        rows: list[float] = engine.drafter.mtp.weight[:, 0].tolist()
        return rows

    rising = torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    monkeypatch.setitem(CHECKPOINT, "mtp.weight", rising)
    kept = mtp("checkpoint", "dummy")
    trained = mtp("trainer")
    for engine in (kept, trained):
        engine.drafter.mtp.quant_method = Swap()
        engine.drafter.mtp.weight.copy_(rising.flip(0))  # as vLLM leaves it
    assert synced(kept, POLICYS) == [2, 1]
    kept.drafter.mtp.weight.zero_()  # as after sleep
    assert synced(kept, POLICYS) == [2, 1]
    assert synced(trained, {**TRAINED, "mtp.weight": 2 * rising}) == [4, 2]


def put_to_sleep(engine: Mtp) -> None:
    """Discard all that the drafter has, as vLLM does before 0.27, which keeps buffers
    of the policy alone.
    """

    def sleep(level: int = 1) -> None:
        for tensor in (engine.drafter.mtp.weight, engine.drafter.table):
            tensor.fill_(float("nan"))

    worker = SimpleNamespace(sleep=sleep)
    keep_buffers_over_sleep.apply(engine.weights.keep_buffers, owner=worker)
    worker.sleep(level=2)


@pytest.mark.parametrize(
    ("source", "stream"), [("checkpoint", POLICYS), ("trainer", TRAINED)]
)
def test_tables_that_sleep_has_discarded_are_there_again(
    mtp: Any, source: str, stream: dict[str, Any]
) -> None:
    engine = mtp(source)
    table = engine.drafter.table
    for times in (1, 2):
        for _ in range(times):
            put_to_sleep(engine)
        assert engine.sync(stream) is None
        assert engine.drafter.table is table and table.eq(1).all()


def test_what_the_trainer_sends_of_tables_stays(mtp: Any) -> None:
    """As the state that EAGLE-3 heads have for tokens that are drafted in parallel."""
    engine = mtp("trainer")
    put_to_sleep(engine)
    for name, weight in {"table": torch.full((2,), 3.0), **TRAINED}.items():
        engine.drafter.load_weights([(name, weight)])
    assert engine.weights.refresh() is None
    assert engine.drafter.table.eq(3).all()


def test_a_checkpoint_without_the_drafters_layer_is_refused(
    mtp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(CHECKPOINT, "mtp.weight")
    with pytest.raises(
        ValueError, match=r"not initialized from checkpoint: \{'mtp.weight'\}"
    ):
        mtp("checkpoint", "dummy")


class DeepSeekMtp(deepseek_mtp.DeepSeekMTP):
    """vLLM's drafter with DeepSeek's MTP layer, the third, of which it has one
    weight.
    """

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.config = DeepseekV3Config(
            num_hidden_layers=2, num_nextn_predict_layers=1, n_routed_experts=4
        )
        self.quant_config = None
        self.is_fused_shared_expert_enabled = False
        layer = torch.nn.ModuleDict({"eh_proj": part(1)})
        self.model = torch.nn.ModuleDict({"layers": torch.nn.ModuleDict({"2": layer})})
        self.model.mtp_start_layer_idx = 2
        self.model.num_mtp_layers = 1


@pytest.mark.parametrize("unchecked", [True, False])
def test_batches_of_a_stream_may_lack_the_layers_for_mtp(
    unchecked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both hosts send each batch to the drafter; vLLM before 0.27 has no way to say
    that it is one of several.
    """
    if not unchecked:
        monkeypatch.setattr(
            deepseek_mtp, "is_mtp_completeness_check_enabled", lambda: True
        )
    drafter = DeepSeekMtp()
    runner = SimpleNamespace(
        model=Model(layer=part(1)), drafter=SimpleNamespace(model=drafter)
    )
    weights = DraftWeights(
        runner, parse({"drafter": "mtp", "draft": {"weights": "trainer"}})
    )
    weights.follow_drafter()
    for number in range(2):
        drafter.load_weights(
            [(f"model.layers.{number}.input_layernorm.weight", torch.ones(2))]
        )
    assert "brought no weight" in str(weights.refresh())
    for number, name in enumerate(("input_layernorm", "input_layernorm", "eh_proj")):
        drafter.load_weights(
            [(f"model.layers.{number}.{name}.weight", torch.full((2, 2), 3.0))]
        )
    assert weights.refresh() is None
    assert drafter.model.layers["2"].eh_proj.weight.eq(3).all()
    drafter.model.layers["2"].eh_proj.weight.weight_loader = lambda parameter, weight: (
        int("no number")
    )
    with pytest.raises(ValueError, match="no number"):
        drafter.load_weights([("model.layers.2.eh_proj.weight", torch.ones(2, 2))])


@pytest.mark.parametrize("tied", [False, True])
def test_an_output_layer_that_the_trainer_may_send_lies_where_cuda_graphs_will_read_it(
    tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A head without one shares the policy's, which may be the policy's embedding, and
    vLLM captures graphs after it has loaded both. Until one comes, the drafter's has
    the values of the policy's.
    """
    embedding = part(1)
    layer = part(1)
    policy = Model(
        embed_tokens=embedding, lm_head=embedding if tied else part(1), layer=layer
    )
    drafter = Model(embed_tokens=embedding, mtp=part(1), lm_head=policy.lm_head)
    config = parse(
        {"drafter": "eagle3", "draft": {"model": "a head", "weights": "trainer"}}
    )
    weights = DraftWeights(
        SimpleNamespace(model=policy, drafter=SimpleNamespace(model=drafter)), config
    )
    weights.follow_drafter()
    place = drafter.lm_head.weight.data_ptr()
    assert place != policy.lm_head.weight.data_ptr()
    assert drafter.embed_tokens is embedding
    for policys, sent, expected in (
        (2, {}, 2),
        (3, {"lm_head.weight": torch.full((2, 2), 7.0)}, 7),
        (4, {}, 7),
    ):
        policy.lm_head.weight.fill_(policys)
        drafter.load_weights({"mtp.weight": torch.ones(2, 2), **sent}.items())
        assert weights.refresh() is None
        assert drafter.lm_head.weight.data_ptr() == place
        assert (drafter.lm_head.weight.mean(), policy.lm_head.weight.mean()) == (
            expected,
            policys,
        )
    assert not caplog.records
    for _ in range(2):
        drafter.load_weights(
            {
                "mtp.weight": torch.ones(2, 2),
                "embed_tokens.weight": torch.ones(2, 2),
            }.items()
        )
    (warning,) = caplog.messages
    assert "the drafter's embed_tokens" in warning
    assert drafter.embed_tokens is not embedding


class Proposer(SimpleNamespace):
    """vLLM's proposer, with the methods that keyed noise takes over."""

    def set_inputs_first_pass(self) -> None: ...

    def _sample_draft_tokens(self) -> None: ...


@pytest.mark.parametrize(
    ("attributes", "options", "keyed"),
    [
        ({"positions": None}, {}, True),
        ({"positions": None}, {"parallel_drafting": True}, False),
        ({"positions": None}, {"use_heterogeneous_vocab": True}, False),
        ({"mrope_positions": None}, {}, False),
    ],
)
def test_drafts_are_drawn_with_keyed_noise_where_a_drafter_has_what_that_takes(
    attributes: dict[str, Any], options: dict[str, Any], keyed: bool
) -> None:
    """vLLM's own drawing maps another vocabulary to the policy's; under M-RoPE there
    are no positions to draw for.
    """
    drafter = Proposer(model=Model(layer=part(1)), **attributes)
    draft = {"model": "a small one", "weights": "trainer", "options": options}
    das = {
        "drafter": "draft_model",
        "draft": draft,
        "budget": "unlimited",
        "speculate": "always",
    }
    policy = Model(layer=part(1))
    layers = SimpleNamespace(static_forward_context={})
    runner = SimpleNamespace(
        drafter=drafter,
        get_model=lambda: policy,
        vllm_config=SimpleNamespace(compilation_config=layers),
    )
    HostWorkerState(runner, parse(das)).loaded()
    taken_over = {"set_inputs_first_pass", "_sample_draft_tokens"} & vars(
        drafter
    ).keys()
    assert len(taken_over) == (2 if keyed else 0)


def test_a_stream_that_reuses_its_buffer_gives_the_drafter_the_weights_it_sent() -> (
    None
):
    drafter = Model(one=torch.nn.Linear(2, 2), two=torch.nn.Linear(2, 2))
    config = parse(
        {
            "drafter": "draft_model",
            "draft": {"model": "a small one", "weights": "trainer"},
        }
    )
    model_config = SimpleNamespace(get_vocab_size=lambda: 2)
    runner = SimpleNamespace(
        speculator=SimpleNamespace(model=drafter),
        speculative_config=SimpleNamespace(draft_model_config=model_config),
    )
    weights = DraftWeights(runner, config)
    weights.follow_drafter()

    def stream() -> Any:
        buffer = torch.zeros(2, 2)
        for number, name in enumerate(("one", "two"), 1):
            buffer.fill_(number)
            yield f"draft.{name}.weight", buffer
        buffer.fill_(9)
        yield "policy.weight", buffer

    policy = []
    weights.load(lambda left: policy.extend(name for name, _ in left), stream())
    assert policy == ["policy.weight"]
    assert drafter.one.weight.unique().tolist() == [1.0]
    assert drafter.two.weight.unique().tolist() == [2.0]


NEW = {name: 5 * weight for name, weight in CHECKPOINT.items()}


@pytest.fixture
def head(mtp: Any, monkeypatch: pytest.MonkeyPatch) -> Mtp:
    """An engine with a drafter whose files may be exchanged."""
    monkeypatch.setattr(drafter_files, "_PAUSE_S", 0.0)
    engine: Mtp = mtp("checkpoint", own_files=True)
    return engine


def test_new_files_are_read_at_the_next_weight_sync(
    head: Mtp, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = head.drafter.attention.W_UV
    for value in (5, 7):
        new = {name: value * weight for name, weight in CHECKPOINT.items()}
        save_file(new, tmp_path / "model.safetensors")
        for _ in range(2):
            caplog.clear()
            assert head.sync(POLICYS) is None
            assert head.values() == [2, 2, 2, value]
        assert not caplog.records  # they are read once
        assert head.drafter.attention.W_UV is made and made.eq(value).all()
    head.drafter.mtp.weight.zero_()  # as after sleep
    assert head.sync(POLICYS) is None and head.values() == [2, 2, 2, 7]
    assert "lost" in caplog.text and "new files" not in caplog.text


def half(path: Path) -> None:
    save_file(NEW, path)
    path.write_bytes(path.read_bytes()[:-1])


def header_alone(path: Path) -> None:
    save_file(NEW, path)
    path.write_bytes(path.read_bytes()[:20])


def other_shape(path: Path) -> None:
    save_file({**NEW, "mtp.weight": torch.ones(3, 2)}, path)


def other_names(path: Path) -> None:
    save_file({**NEW, "another.weight": torch.ones(3, 2)}, path)


def a_shard_is_missing(path: Path) -> None:
    save_file(NEW, path)
    index = {"weight_map": {name: path.name for name in [*NEW, "other"]}}
    path.with_name("model.safetensors.index.json").write_text(json.dumps(index))


def no_text(path: Path) -> None:
    path.write_bytes((8).to_bytes(8, "little") + b"[1, 2, 3")


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (half, "bytes, its header says"),
        (header_alone, "has no finished header"),
        (no_text, "has no finished header"),
        (other_shape, "found mtp.weight with shape (3, 2), allowed"),
        (other_names, "found another.weight with shape (3, 2), allowed"),
        (a_shard_is_missing, "other is in model.safetensors.index.json and in no file"),
    ],
)
def test_files_that_can_not_be_read_leave_the_weights_and_are_named_once(
    head: Mtp, tmp_path: Path, caplog: pytest.LogCaptureFixture, write: Any, said: str
) -> None:
    write(tmp_path / "model.safetensors")
    for _ in range(3):
        assert head.sync(POLICYS) is None
        assert head.values() == [2, 2, 2, 1]
    [record] = caplog.records
    assert record.levelname == "ERROR" and said in record.getMessage()
    index = tmp_path / "model.safetensors.index.json"
    index.unlink(missing_ok=True)
    save_file(NEW, tmp_path / "model.safetensors")
    assert head.sync(POLICYS) is None and head.values() == [2, 2, 2, 5]


@pytest.mark.parametrize("when", ["before", "meanwhile", "fails"])
def test_files_that_change_while_they_are_read_leave_the_weights(
    head: Mtp,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    path = tmp_path / "model.safetensors"
    save_file(NEW, path)
    made = head.drafter.attention.W_UV

    def write_on(*_: Any) -> None:
        os.utime(path, ns=(0, time.time_ns()))

    def fail() -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patched:
        if when == "before":
            patched.setattr(drafter_files, "time", SimpleNamespace(sleep=write_on))
        else:
            then = write_on if when == "meanwhile" else fail
            patched.setattr(head.drafter, "after_loading", then)
        assert head.weights.refresh() is None
    assert head.values() == [1, 1, 1, 1]
    assert made.eq(1).all() and head.drafter.attention.W_UV is made
    said = "the disk is gone" if when == "fails" else "its files are being written"
    assert said in caplog.text
    assert head.weights.refresh() is None and head.values() == [1, 1, 1, 5]


def test_lost_weights_that_can_not_be_read_again_are_an_alarm(
    head: Mtp, tmp_path: Path
) -> None:
    half(tmp_path / "model.safetensors")
    head.drafter.mtp.weight.zero_()  # as after sleep
    for _ in range(2):
        alarm = str(head.sync(POLICYS))
        assert "das.draft.model: the lost weights can't be read again" in alarm
    save_file(NEW, tmp_path / "model.safetensors")
    assert head.sync(POLICYS) is None and head.values() == [2, 2, 2, 5]


def test_a_quantised_drafter_keeps_its_weights(
    mtp: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = mtp("checkpoint", quantization="fp8", own_files=True)
    save_file(NEW, tmp_path / "model.safetensors")
    assert engine.sync(POLICYS) is None and engine.values() == [2, 2, 2, 1]
    assert "a quantised drafter's files are read at the engine's start" in caplog.text
