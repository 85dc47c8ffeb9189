"""How many draft tokens of each request a step verifies, decided on the device from the newest drafts: vLLM's adaptive
verification, with the controller's total and the controller's worth of a request's tokens.

The host only chooses how many tokens a step has. Which drafts they belong to is ranked on the device, by the chance of
a token to be reached and accepted times what it is worth; steps of unequal lengths replay full CUDA graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

from das_adapter.patching import patch

SOURCE = "_das_wants"
"""Attribute of vLLM's `RequestState`: the first two arguments of `Admission`."""


class Wanted(NamedTuple):
    """What the controller wants of a request's next draft."""

    tokens: int
    worth: float
    """Seconds that an accepted token saves."""


class Admission(AdaptiveVerificationManager):
    """Stands in the place of vLLM's own manager."""

    def __init__(self, wants: Callable[[], Mapping[str, Wanted]], outputs: Any, **stock: Any) -> None:
        """
        Args:
            wants: returns what the controller wants, by request id.
            outputs: stream of the runner on which outputs go to the host; None: on a CPU.
            stock: of vLLM's manager.
        """
        super().__init__(**stock)
        self._wants, self._known = wants, cast(Mapping[str, Wanted], {})
        self._outputs = outputs
        self._weights = torch.ones_like(self._confidence_probs[:, 0])
        self._admitted: tuple[list[str], torch.Tensor] | None = None

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        """Nothing: what steps cost, the controller knows."""
        return iter(())

    def set_initial_cost_curves(self, samples: list[Any]) -> None:
        """Nothing, see above."""

    def get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        """Return the tokens of a step."""
        wants = self._wants()
        if wants is not self._known:
            self._known = wants
            self._weigh(wants)
        drafts = {req_id: len(draft_tokens.get(req_id, ())) for req_id in num_tokens_per_req}
        others = {req_id: count - drafts[req_id] for req_id, count in num_tokens_per_req.items()}
        wanted = sum(min(wants[req_id].tokens, most) for req_id, most in drafts.items() if req_id in wants)
        room = max(0, self._max_total_logits - len(drafts) * self.num_bonus_tokens)
        budget = min(wanted, room)
        self._batch_budget = drafts, others, budget
        return sum(others.values()) + budget

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: torch.Tensor) -> Any:
        """Admit the drafts; see `AdaptiveVerificationManager`."""
        answer = super().reallocate_drafts(req_ids, idx_mapping)
        admitted = self._batch_draft_capacity[: len(req_ids)].clone()
        if self._outputs is not None:  # the output of this step follows on the same stream
            self._outputs.wait_stream(torch.cuda.current_stream())
            admitted.record_stream(self._outputs)
            with torch.cuda.stream(self._outputs):
                admitted = admitted.to("cpu", non_blocking=True)
        self._admitted = list(req_ids), admitted
        return answer

    def take_admitted(self) -> tuple[list[str], torch.Tensor] | None:
        """Return the requests of the present step, and how many draft tokens each has in it, int32 [requests], on the
        host when the step's output is; None: all that were scheduled."""
        admitted, self._admitted = self._admitted, None
        return admitted

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: Any) -> None:
        """Keep the chances of the newest drafts, float32 [requests, steps], for the ranking."""
        slots = input_batch.idx_mapping
        chances = confidence_probs[: input_batch.num_reqs].clone()
        chances[:, 0] *= self._weights[slots]
        self._confidence_probs[slots] = chances

    def add_request(self, req_idx: int) -> None:
        """Forget the drafts of the slot's last request."""
        self._confidence_probs[req_idx].fill_(1.0)

    def _weigh(self, wants: Mapping[str, Wanted]) -> None:
        slots = self.req_states.req_id_to_index
        worth = {slots[req_id]: want.worth for req_id, want in wants.items() if req_id in slots}
        if not worth:
            return
        weights = np.ones(len(self._weights), dtype=np.float32)
        weights[list(worth)] = np.fromiter(worth.values(), dtype=np.float32) / max(max(worth.values()), 1e-12)
        async_tensor_h2d(weights, out=self._weights)


def wants_of(req_ids: Iterable[str], tokens: np.ndarray, worth: np.ndarray) -> dict[str, Wanted]:
    """Put a plan in the form that the manager reads: `tokens` int64 and `worth` float64, [requests] each."""
    return {req_id: Wanted(*pair) for req_id, *pair in zip(req_ids, tokens.tolist(), worth.tolist(), strict=True)}


@patch(
    "vllm.v1.worker.gpu.model_runner:maybe_create_adaptive_verification_manager",
    since="0.31",
    needs="req_states, query_start_loc, num_bonus_tokens, max_total_logits",
)
def admit_what_is_worth_it(stock: Any) -> Any:
    """Without it vLLM trims drafts by its own estimate, for which every request's tokens are worth the same (V2
    runner). Remove this patch when vLLM takes a plug-in's worth for each request's draft tokens."""

    @functools.wraps(stock)
    def create(**kwargs: Any) -> Any:
        made, source = stock(**kwargs), getattr(kwargs["req_states"], SOURCE, None)
        if made is None or source is None:
            return made
        names = (
            "req_states",
            "query_start_loc",
            "num_bonus_tokens",
            "max_total_logits",
            "copy_admitted_drafts_to_host",
        )
        return Admission(*source, **{name: kwargs[name] for name in names if name in kwargs})

    return create
