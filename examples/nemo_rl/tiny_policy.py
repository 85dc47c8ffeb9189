"""A policy for NeMo-RL's `policy_factory` that is really trained: a Hugging Face model,
torch, AdamW, one CPU thread.

With `policy.draft.enabled` an EAGLE-3 head is trained beside it, as NeMo-RL's Megatron
policy does it: on NeMo-RL's draft loss, in a pass over what the policy has read. Its
weights are sent at each refit, with `draft.` before their names.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ray
import torch
import zmq
from make_drafters import Eagle3, head_for
from nemo_rl.algorithms.loss.loss_functions import DraftCrossEntropyLossFn
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.named_sharding import NamedSharding
from nemo_rl.models.policy.interfaces import ColocatablePolicyInterface
from nemo_rl.models.policy.utils import IPCProtocol, calculate_aligned_size
from safetensors.torch import load_file

from das_adapter.cpu.nemo_rl_process import REFIT_SOCKETS

DRAFT_LR = 3e-3
"""Learning rate of the EAGLE-3 head."""


@ray.remote(num_cpus=0)
class Trainer:
    """Holds the weights and the optimizer."""

    def __init__(
        self,
        config: dict[str, Any],
        replicas: int,
        weights: Path | None,
        optimizer: Path | None,
    ):
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_pretrained(
            config["model_name"], dtype=torch.float32
        )
        self.policy = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            self.policy, lr=config["optimizer"]["kwargs"]["lr"]
        )
        self.draft = self._attach_draft(config)
        self.draft_loss = DraftCrossEntropyLossFn()
        for part, path in ((self.model, weights), (self.optimizer, optimizer)):
            if path is not None:
                part.load_state_dict(torch.load(path))
        self.micro = config["train_micro_batch_size"]
        self.clip = config["max_grad_norm"]
        context = zmq.Context()
        self.sockets = [context.socket(zmq.REQ) for _ in range(replicas)]
        for i, socket in enumerate(self.sockets):
            socket.bind(f"ipc:///tmp/{os.environ[REFIT_SOCKETS]}-{i}.sock")

    def _attach_draft(self, config: dict[str, Any]) -> Eagle3 | None:
        """Make the head a part of the model, with which it is saved, and sent as
        `draft.*`; return it. None: there is none.
        """
        draft = config.get("draft") or {}
        if not draft.get("enabled"):
            return None
        # the policy's random state is that of a run without it
        with torch.random.fork_rng():
            head = head_for(self.model)
        self.model.draft = head
        head.load_state_dict(load_file(Path(draft["model_name"]) / "model.safetensors"))
        self.optimizer.add_param_group(
            {"params": list(head.parameters()), "lr": DRAFT_LR}
        )
        self.draft_weight = draft["loss_weight"]
        return head

    def save(self, weights: str, optimizer: str | None) -> None:
        """Write the weights and the optimizer's state to files."""
        for part, path in ((self.model, weights), (self.optimizer, optimizer)):
            if path is not None:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                torch.save(part.state_dict(), path)

    def refit_info(self) -> dict[str, Any]:
        """Return the shape and dtype of each tensor that `send_weights` will send."""
        info = {}
        for name, weight in self.model.state_dict().items():
            info[name] = (weight.shape, weight.dtype)
        return info

    def send_weights(self) -> None:
        """Send all weights to every replica in one message, by NeMo-RL's protocol."""
        weights = self.model.state_dict()
        parts = []
        for weight in weights.values():
            as_bytes = weight.detach().contiguous().view(torch.uint8)
            data = as_bytes.numpy().tobytes()
            aligned_size = calculate_aligned_size(len(data))
            parts.append(data.ljust(aligned_size, b"\0"))
        payload = b"".join(parts)
        for message in ((payload, list(weights), len(payload)), IPCProtocol.COMPLETE):
            for socket in self.sockets:
                socket.send_pyobj(message)
            for socket in self.sockets:
                socket.recv()

    def _read(self, data: Any) -> Any:
        """Have the policy read the rows; its output has logits and hidden states."""
        mask = (
            torch.arange(data["input_ids"].shape[1])[None]
            < data["input_lengths"][:, None]
        )
        return self.model(
            input_ids=data["input_ids"],
            attention_mask=mask.long(),
            output_hidden_states=True,
        )

    @staticmethod
    def _logprobs(read: Any, data: Any) -> torch.Tensor:
        """Return the log-probability of every token but the first, float32 [rows,
        tokens - 1].
        """
        chosen = data["input_ids"][:, 1:, None]
        logprobs = read.logits[:, :-1].log_softmax(-1)
        return logprobs.gather(-1, chosen).squeeze(-1)

    def _draft_loss(
        self, read: Any, data: Any, sequences: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return NeMo-RL's draft loss of one draft step. It does not change the
        policy's gradients.
        """
        with torch.no_grad():
            embeds = self.model.get_input_embeddings()(data["input_ids"])
        [(ahead, logits)] = self.draft.drafts(
            [state.detach() for state in read.hidden_states], embeds, 1
        )
        return self.draft_loss(
            teacher_logits=read.logits[:, ahead:-1].detach(),
            student_logits=logits,
            token_mask=data["token_mask"][:, ahead + 1 :],
            data=data,
            global_valid_seqs=sequences,
            global_valid_toks=tokens,
        )

    @torch.no_grad()
    def logprobs(self, data: Any) -> torch.Tensor:
        """Return the log-probability of every token, float32 [rows, tokens]; 0 for the
        first token.
        """
        slices = (
            data.slice(i, i + self.micro) for i in range(0, data.size, self.micro)
        )
        parts = [self._logprobs(self._read(part), part) for part in slices]
        return torch.nn.functional.pad(torch.cat(parts), (1, 0))

    def train(self, data: Any, loss_fn: Any) -> dict[str, Any]:
        """Take one optimizer step over the batch; return its figures."""
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        sequences = data["sample_mask"].sum()
        tokens = mask.sum()
        metrics: dict[str, list[float]] = {}
        total = torch.zeros(())
        for i in range(0, data.size, self.micro):
            part = data.slice(i, i + self.micro)
            read = self._read(part)
            loss, figures = loss_fn(self._logprobs(read, part), part, sequences, tokens)
            loss.backward()
            total += loss.detach()
            if self.draft:
                draft_loss = self._draft_loss(read, part, sequences, tokens)
                (self.draft_weight * draft_loss).backward()
                figures = {**figures, "draft_loss": draft_loss.item()}
            for name, value in figures.items():
                metrics.setdefault(name, []).append(value)
        norms = {
            "grad_norm": torch.nn.utils.clip_grad_norm_(self.policy, self.clip)[None]
        }
        # each by its own norm: the policy's update is that of a run without a drafter
        if self.draft:
            norms["draft_grad_norm"] = torch.nn.utils.clip_grad_norm_(
                self.draft.parameters(), self.clip
            )[None]
        self.optimizer.step()
        self.optimizer.zero_grad()
        metrics |= {
            "global_valid_seqs": [sequences.item()],
            "global_valid_toks": [tokens.item()],
            "lr": [self.optimizer.param_groups[0]["lr"]],
            "wd": [0.0],
        }
        return {"loss": total[None], **norms, "all_mb_metrics": metrics}


class TinyPolicy(ColocatablePolicyInterface):
    """The policy as NeMo-RL sees it: every call goes to the trainer."""

    def __init__(
        self,
        config: dict[str, Any],
        replicas: int,
        weights: Path | None,
        optimizer: Path | None,
    ):
        """Start the trainer. `weights`, `optimizer`: files of a checkpoint; None: the
        weights that `config` names, and a new optimizer.
        """
        self.trainer = Trainer.remote(config, replicas, weights, optimizer)
        self.sharding_annotations = NamedSharding([0], ["data_parallel"])

    def get_logprobs(self, data: Any, timer: Any = None, **kwargs: Any) -> Any:
        return BatchedDataDict(
            {"logprobs": ray.get(self.trainer.logprobs.remote(data))}
        )

    def train(
        self, data: Any, loss_fn: Any, eval_mode: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        return ray.get(self.trainer.train.remote(data, loss_fn))

    def save_checkpoint(
        self, weights_path: str, optimizer_path: str | None = None, **kwargs: Any
    ) -> None:
        ray.get(self.trainer.save.remote(weights_path, optimizer_path))

    def prepare_refit_info(self) -> dict[str, Any]:
        return ray.get(self.trainer.refit_info.remote())

    def stream_weights_via_ipc_zmq(
        self, buffer_size_bytes: int, kv_scales: Any = None
    ) -> list[Any]:
        return [self.trainer.send_weights.remote()]

    def broadcast_weights_for_collective(
        self, kv_scales: Any = None, **kwargs: Any
    ) -> list[Any]:
        return [self.trainer.send_weights.remote()]

    def init_collective(self, *args: Any, **kwargs: Any) -> list[Any]:
        return []

    def get_free_memory_bytes(self) -> int:
        return 2**30

    def shutdown(self) -> bool:
        ray.kill(self.trainer)
        return True

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Move nothing: weights, gradients and optimizer stay where they are."""

    prepare_for_training = finish_training = prepare_for_lp_inference = _nothing
    offload_before_refit = offload_after_refit = print_node_ip_and_gpu_id = (
        finalize_async_save
    ) = _nothing

    def _unused(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    get_reference_policy_logprobs = get_topk_logits = calibrate_qkv_fp8_scales = _unused
