"""Weights of vLLM's own neural drafters (EAGLE-3, MTP, a draft model, DFlash, DSpark):
they follow the policy, or stay as they were.

vLLM updates only the policy at a weight sync, and sleep may discard the drafter's
weights. In both cases acceptance collapses, while every token stays right.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from das_adapter.config import DasConfig
from das_adapter.engine.drafter_files import DrafterFiles
from das_adapter.patching import patch
from das_adapter.trouble import reason

logger = logging.getLogger("das_adapter")

PREFIX = "draft."
"""Prefix of the names of the drafter's weights in the stream of a trainer that trains
it too (NeMo-RL's convention).
"""

SHARED = ("lm_head", "embed_tokens")
"""Modules that vLLM has an EAGLE-3, DFlash or DSpark head share with the policy."""

processed: WeakSet[torch.nn.Module] = WeakSet()
"""Drafters with the weights of their checkpoint, from which vLLM has made those that it
computes with.
"""

NamedWeight = tuple[str, torch.Tensor]
Weights = Iterable[NamedWeight]
Layers = tuple[torch.nn.Module, torch.nn.Module]
"""A layer of the drafter beside the policy's."""


class KeptTensor(NamedTuple):
    """A tensor of a module, and a copy of its values on the host."""

    module: torch.nn.Module
    name: str
    tensor: torch.Tensor
    values: torch.Tensor

    def restore(self) -> None:
        """Give the module the tensor again, with these values."""
        self.tensor.data.copy_(self.values)
        if getattr(self.module, self.name) is not self.tensor:
            setattr(self.module, self.name, self.tensor)


class DraftWeights:
    """The drafter's part of the host's weight stream, and a check of weights that the
    host does not send.
    """

    def __init__(self, runner: Any, config: DasConfig):
        self._runner = runner
        self._config = config
        self._arrived = 0
        """Weights of the drafter that have arrived since the last weight sync."""
        self._mark: list[float] = []
        """Fingerprint of the weights of the drafter's checkpoint."""
        self._files = DrafterFiles(None)
        """Files of that checkpoint, where they may be exchanged."""
        self._not_read = ""
        """Why its files can't be read, as the log says; empty: they can."""
        self._reading = False
        """Whether it is the drafter's checkpoint that is being loaded."""
        self._follows: list[Layers] = []
        """The drafter's output layer beside the policy's, whose values it has until the
        trainer sends its own.
        """
        self._refused: str | None = None
        """Why weights that the trainer has sent were refused; None: none were."""
        self._buffers: dict[str, torch.Tensor] = {}
        """Copies on the host of the drafter's buffers, from sleep at level 2 to the
        first weights after it.
        """

    @property
    def drafter(self) -> Any:
        """vLLM's drafter model."""
        source = getattr(self._runner, "speculator", None)
        if not source:
            source = self._runner.drafter
        return source.model

    def follow_drafter(self) -> None:
        """Take over the drafter, which vLLM has just loaded with the policy."""
        for name in SHARED:
            if getattr(self.drafter, f"has_own_{name}", False):
                self._part_from_policy(name)
        may_share = self._config.method == "eagle3" or self._config.parallel
        if self._config.draft.weights == "trainer" and may_share:
            # now: CUDA graphs will read it where it lies
            self._follows = self._part_from_policy("lm_head")
        # which some draft models call otherwise
        inner = getattr(self.drafter, "model", None)
        if hasattr(inner, "_build_fused_kv_buffers"):
            keep_addresses.apply(inner, owner=inner)
        see_weight_stream.apply(self._load_drafter, owner=self.drafter)
        if self._config.draft.weights == "checkpoint":
            process_once.apply()
            processed.add(self.drafter)
            # the trainer sends the policy's weights only
            if self._runner.load_config.load_format == "dummy":
                self._read_checkpoint()
            self._files = DrafterFiles(self._config.draft.model)
            self._mark = self._fingerprint()

    def keep_buffers(self) -> None:
        """Copy the drafter's buffers, such as rotary tables, to the host, before sleep
        discards them.
        """
        if self._buffers:
            return
        for name, buffer in self.drafter.named_buffers():
            self._buffers[name] = buffer.to("cpu", copy=True)

    def load(
        self,
        stock: Callable[..., Any],
        weights: Weights,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Load the policy's weights from a stream (with `stock`), and the drafter's
        that are among them.
        """
        kept: list[NamedWeight] = []
        result = stock(self._split(weights, kept), *args, **kwargs)
        if kept:
            model = self._runner.speculative_config.draft_model_config
            vocab = model.get_vocab_size()
            trimmed = []
            for name, weight in kept:
                has_vocabulary = "embed_tokens" in name or "lm_head" in name
                if has_vocabulary:
                    weight = weight[:vocab]  # trainers pad the vocabulary
                trimmed.append((name, weight))
            self.drafter.load_weights(trimmed)
        return result

    def refresh(self) -> str | None:
        """Return what is wrong with the drafter's weights after a weight sync, None if
        nothing is. Those of its checkpoint are read again where they were lost, or
        where its files were exchanged.
        """
        arrived = self._arrived
        self._arrived = 0
        for own_layer, policy_layer in self._follows:
            own_weights = own_layer.parameters()
            policy_weights = policy_layer.parameters()
            for own, policy in zip(own_weights, policy_weights, strict=True):
                own.data.copy_(policy)
        if self._config.draft.weights == "trainer":
            if not arrived:
                names = f"with {PREFIX!r} in front"
                if self._config.method == "mtp":
                    names = "as in the policy's checkpoint"
                return (
                    "das.draft.weights: found 'trainer', but this weight sync brought"
                    f" no weight of the drafter (names {names}): it drafts for an older"
                    " policy"
                )
            return self._refused
        # after sleep at level 2, or when they were overwritten
        are_lost = self._fingerprint() != self._mark
        if not are_lost and not self._files.have_changed:
            return self._refused
        if are_lost:
            logger.warning(
                "das: the drafter's weights were lost; reading its checkpoint again"
            )
        trouble = self._read_files(are_lost)
        if trouble and are_lost:
            return f"das.draft.model: the lost weights can't be read again: {trouble}"
        if trouble and trouble != self._not_read:
            logger.error(
                "das: the drafter keeps its weights: its new files in %s are not read:"
                " %s",
                self._config.draft.model,
                trouble,
            )
        self._not_read = trouble
        return self._refused

    def _read_files(self, are_lost: bool) -> str:
        """Read the drafter's checkpoint, all of it or nothing; return what is wrong
        with it, empty if nothing is. `are_lost`: there are no weights to keep.
        """
        was_processed = self.drafter in processed
        kept: list[KeptTensor] = []
        try:
            model = self._runner.speculative_config.draft_model_config
            if model.quantization is not None and not are_lost:
                return "a quantised drafter's files are read at the engine's start only"
            were_exchanged = self._files.have_changed
            identity = self._files.check()
            if not are_lost:
                kept = self._copy_tensors()
            self._read_checkpoint()
            self._files.note_read(identity)
        except Exception as error:
            for tensor in kept:
                tensor.restore()
            if kept and was_processed:
                processed.add(self.drafter)
            return reason(error)
        self._mark = self._fingerprint()
        if were_exchanged:
            logger.warning(
                "das: the drafter's weights were read from the new files in %s",
                self._config.draft.model,
            )
        return ""

    def _copy_tensors(self) -> list[KeptTensor]:
        """Copy to the host what only the drafter has: its weights, and what was made of
        them.
        """
        shared = {weight.data_ptr() for weight in self._runner.model.parameters()}
        kept = []
        for module in self.drafter.modules():
            named = {
                **dict(module.named_parameters(recurse=False)),
                **dict(module.named_buffers(recurse=False)),
                **vars(module),
            }
            for name, value in named.items():
                if isinstance(value, torch.Tensor) and value.data_ptr() not in shared:
                    copied = value.detach().to("cpu", copy=True)
                    kept.append(KeptTensor(module, name, value, copied))
        return kept

    def _split(
        self,
        weights: Weights,
        kept: list[NamedWeight],
    ) -> Iterator[NamedWeight]:
        """Yield the policy's weights; copy the drafter's into `kept`, because a stream
        reuses its buffers.
        """
        for name, weight in weights:
            if name.startswith(PREFIX):
                own_name = name.removeprefix(PREFIX)
                kept.append((own_name, weight.clone()))
            else:
                yield name, weight

    def _load_drafter(
        self,
        stock: Callable[..., Any],
        weights: Weights,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Load weights that somebody sends to the drafter itself (with `stock`): this
        class, or NeMo-RL, which splits the trainer's stream before the policy sees
        it.
        """
        self._restore_buffers()
        if self._config.method == "mtp":
            loaded = self._load_mtp_layers(stock, weights, *args, **kwargs)
        elif self._reading or self._config.draft.weights == "trainer":
            loaded = stock(self._own(weights), *args, **kwargs)
        else:
            for name, _ in weights:
                self._refuse(PREFIX + name)
            return set()
        if not loaded:
            return loaded
        # vLLM asks the checkpoint for the derived ones too
        return {*loaded, *self._derived()}

    def _restore_buffers(self) -> None:
        """Give the drafter the buffers that sleep has discarded: before any weights,
        which may bring some of them.
        """
        kept = self._buffers
        self._buffers = {}
        if not kept:
            return
        for name, buffer in self.drafter.named_buffers():
            buffer.data.copy_(kept[name])

    def _load_mtp_layers(
        self,
        stock: Callable[..., Any],
        weights: Weights,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Load the layers for MTP from the policy's stream, which hosts send to the
        drafter too, or from a checkpoint. Both have the embedding and output layer that
        the drafter shares with the policy; the checkpoint's are older.
        """
        if self._refused and not self._reading:
            return set()
        policy = {id(weight) for weight in self._runner.model.parameters()}
        shared = {}
        if self._reading:
            for weight in self.drafter.parameters():
                if id(weight) in policy:
                    shared[weight] = weight.data
        for parameter, present in shared.items():
            parameter.data = torch.empty_like(present, device="cpu")
        loaded: Any = set()
        try:
            with nullcontext() if self._reading else lacking_layers():
                loaded = stock(weights, *args, **kwargs)
        finally:
            for parameter, present in shared.items():
                parameter.data = present
        named = dict(self.drafter.named_parameters(remove_duplicate=False))
        own = set()
        for name in loaded or ():
            weight = named.get(name)
            if weight is not None and id(weight) not in policy:
                own.add(name)
        self._arrived += len(own)
        is_fixed = self._config.draft.weights == "checkpoint"
        if own and is_fixed and not self._reading:
            self._refuse(min(own))
        return loaded

    def _refuse(self, name: str) -> None:
        """Note that the trainer sends a weight that is not wanted; raising would leave
        it waiting for ever.
        """
        self._refused = (
            "das.draft.weights: found 'checkpoint', but the trainer sends the"
            f" drafter's weights too ({name}, ...): set it to 'trainer'"
        )

    def _own(self, weights: Weights) -> Iterator[NamedWeight]:
        """Count weights of the drafter's own; none of them may be loaded into the
        policy.
        """
        for name, weight in weights:
            self._arrived += 1
            for shared in SHARED:
                if shared not in name:
                    continue
                parted = self._part_from_policy(shared)
                if parted and not self._reading:
                    logger.warning(
                        "das: the trainer sends the drafter's %s, which was the"
                        " policy's until now: CUDA graphs that were captured go on"
                        " reading the policy's, and draft worse; put one into the"
                        " checkpoint",
                        shared,
                    )
            if "lm_head" in name:
                self._follows = []
            yield name, weight

    def _derived(self) -> Iterator[str]:
        """Yield the names of what attention layers have made of other weights, as MLA
        does of `kv_b_proj`.
        """
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        for path, module in self.drafter.named_modules():
            if isinstance(module, AttentionLayerBase):
                for name, _ in module.named_parameters(recurse=False):
                    yield f"{path}.{name}"

    def _part_from_policy(self, name: str) -> list[Layers]:
        """Give the drafter an output layer or embedding of its own, with the same
        values, where it shares the policy's: where its checkpoint has none, or an equal
        one. Return it beside the policy's; empty: it has its own.
        """
        policy = {id(weight) for weight in self._runner.model.parameters()}
        parted = []
        # both may be one in the policy
        modules = list(self.drafter.named_modules(remove_duplicate=False))
        for path, shared in modules:
            owner, _, leaf = path.rpartition(".")
            if leaf != name:
                continue
            weight_ids = {id(weight) for weight in shared.parameters()}
            if policy.isdisjoint(weight_ids):
                continue
            own = copy.deepcopy(shared)
            new_weights = own.parameters()
            old_weights = shared.parameters()
            for new, old in zip(new_weights, old_weights, strict=True):
                # how it is loaded: copies lose it
                new.__dict__.update(old.__dict__)
            setattr(self.drafter.get_submodule(owner), name, own)
            parted.append((own, shared))
        return parted

    def _read_checkpoint(self) -> None:
        """Load the weights of the drafter's checkpoint."""
        from vllm.config import set_current_vllm_config
        from vllm.config.load import LoadConfig
        from vllm.model_executor.model_loader import get_model_loader
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        for weight in self.drafter.parameters():
            # EAGLE-3's table of tokens: zeros where the checkpoint has none
            if not weight.is_floating_point():
                weight.data.zero_()
        model = self._runner.speculative_config.draft_model_config
        loader = get_model_loader(LoadConfig(load_format="auto"))
        self._reading = True
        processed.discard(self.drafter)
        try:
            with set_current_vllm_config(self._runner.vllm_config):
                loader.load_weights(self.drafter, model)
                if model.quantization is None:
                    process_weights_after_loading(
                        self.drafter,
                        model,
                        self._runner.device,
                    )
                    processed.add(self.drafter)
        finally:
            self._reading = False

    def _fingerprint(self) -> list[float]:
        """Return the sum of a few values of each weight that only the drafter has."""
        shared = {weight.data_ptr() for weight in self._runner.model.parameters()}
        sums = []
        for weight in self.drafter.parameters():
            if weight.numel() and weight.data_ptr() not in shared:
                values = weight.detach().flatten()[:16]
                magnitudes = values.float().abs()
                sums.append(magnitudes.sum().item())
        return sums


@contextmanager
def lacking_layers() -> Iterator[None]:
    """Let layers for MTP be missing in what is loaded: hosts send a stream in several
    batches, of which vLLM's drafters take each for a whole checkpoint. What they miss
    they say at the end, when all that is there has been loaded.
    """
    try:
        from vllm.model_executor.model_loader.mtp_validation import (
            disable_mtp_completeness_check as unchecked,
        )
    except ImportError:  # vLLM before 0.27
        unchecked = nullcontext
    try:
        with unchecked():
            yield
    except ValueError as error:  # also of some drafters of newer ones
        if "MTP speculative decoding layer" not in str(error):
            raise


@patch(
    "vllm.model_executor.models.interfaces_base:VllmModel.load_weights",
    since="0.24",
    adds=True,
)
def see_weight_stream(stock: Any, load: Callable[..., Any]) -> Any:
    """Without it the policy refuses the drafter's weights in the trainer's stream and
    the drafter never gets them; a weight sync that brought it nothing, or what it was
    not to have, goes unnoticed; and so does any weight update where there is no host:
    trainers' own worker extensions call nothing else. Remove this patch when vLLM's
    weight updates reach the drafter, and tell plug-ins which weights they brought.
    """
    return lambda *args, **kwargs: load(stock, *args, **kwargs)


@patch(
    "vllm.model_executor.model_loader.utils:process_weights_after_loading",
    since="0.24",
    needs="model",
    feature="drafters with weights of their own",
)
def process_once(stock: Any) -> Any:
    """Without it layers for MTP that no weight sync brings are lost at each, with
    kernels for which vLLM swaps or shuffles the weights of experts, and are read from
    the checkpoint again: hosts have vLLM do so after a weight sync in the drafter too.
    Remove this patch when vLLM does it once however often it is asked.
    """

    def process_weights_after_loading(
        model: torch.nn.Module,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if model not in processed:
            stock(model, *args, **kwargs)

    return process_weights_after_loading


@patch(
    "vllm.v1.worker.gpu_worker:Worker.sleep",
    since="0.24",
    needs="level",
    feature="drafters with weights of their own",
)
def keep_buffers_over_sleep(stock: Any, keep: Callable[[], None]) -> Any:
    """Without it, before vLLM 0.27, a drafter that does not share the policy's rotary
    tables has none after sleep at level 2: vLLM keeps the policy's alone. Remove this
    patch when 0.27 is the oldest vLLM that is supported.
    """

    def sleep(level: int = 1) -> None:
        if level == 2:
            keep()
        stock(level)

    return sleep


@patch(
    "vllm.model_executor.models.qwen3_dflash:DFlashQwen3Model._build_fused_kv_buffers",
    since="0.29",
)
def keep_addresses(stock: Any, drafter: Any) -> Any:
    """Without it the CUDA graphs of a DFlash or DSpark drafter read the policy's text,
    after a weight sync, by what was made of the drafter's first weights, in memory that
    is free by then: its drafts are no good, while every token stays right. Remove this
    patch when vLLM makes it in place.
    """

    def build() -> None:
        before = {}
        for name, value in vars(drafter).items():
            if isinstance(value, torch.Tensor):
                before[name] = value
        stock()
        for name, kept in before.items():
            made = getattr(drafter, name)
            if made is not kept and made.data_ptr() != kept.data_ptr():
                setattr(drafter, name, kept.copy_(made))

    return build
