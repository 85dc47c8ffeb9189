"""How many draft tokens of each request a step verifies, decided on the device from the
newest drafts: vLLM's adaptive verification, with the controller's total and its worth
of a request's tokens.

The host chooses how many draft tokens a step has, and the most of each request, before
the drafts exist. Which drafts they belong to is ranked on the device, by the chance
that a token is reached and accepted times what it is worth. Steps of unequal lengths
replay full CUDA graphs: one graph for each captured number of tokens.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, count, repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.attn_utils import get_query_lens_mismatch_unsupported_backend
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import (
    AdaptiveVerificationManager,
)

from das_adapter.engine.plan import DraftPlan, PlanInForce
from das_adapter.engine.runner import HOST_PLANS, NO_GRAPHS, ONE_LENGTH, SMALL_HEADS
from das_adapter.engine.timing import an_eighth_apart
from das_adapter.engine.v2.ranking import Ranking
from das_adapter.engine.v2.speculator import to_host
from das_adapter.patching import patch

ADMITS = "_das_admits"
"""Attribute of vLLM's `RequestState`: makes the `Admission` of its model runner from
vLLM's arguments; returns None where all requests of a step have one length.
"""


_SMALL_SIZES = (1, 2, 4)
"""Sizes of vLLM's graphs for steps without drafts that are no multiples of 8."""


class BatchBudget(NamedTuple):
    """The draft tokens that a step may verify."""

    req_ids: list[str]
    shares: npt.NDArray[np.int32]
    """The limit, other tokens and worth of each request, see `Ranking.admit`, int32
    [3, requests].
    """
    num_verified: int
    """Draft tokens of all requests together."""


class Admission(AdaptiveVerificationManager):
    """Stands in the place of vLLM's own manager. All ranks admit alike: they rank the
    same chances by the same plan, which came with the scheduler's output.
    """

    def __init__(
        self,
        drops: Callable[[Iterable[str]], bool],
        in_force: PlanInForce,
        ranking: Ranking,
        failed: Callable[[Exception], None],
        largest: int = 0,
        **stock: Any,
    ) -> None:
        """
        Args:
            drops: returns whether a step of some requests verifies no drafts.
            in_force: the plan of the present step.
            ranking: of as many slots and steps.
            failed: is told why the chances of drafts could not be kept.
            largest: most tokens that a graph holds; 0: there are none.
            stock: arguments of vLLM's manager.

        Raises:
            RuntimeError, or what the compiler raises: see `Ranking.check`.
        """
        super().__init__(**stock)
        self.drops = drops
        self._failed = failed
        self._largest = largest
        signature = inspect.signature(AdaptiveVerificationManager.__init__)
        # vLLM 0.33 and later
        option = "copy_admitted_drafts_to_host"
        self._tells_admitted = option in signature.parameters
        self._in_force = in_force
        self._plan = DraftPlan()
        """The plan by which the newest drafts were made, which the next step verifies.
        """
        self.admitted: torch.Tensor | None = None
        """Draft tokens of each request of the present step in batch order, int32
        [requests], on the host when the step's output is; None: no request has any.
        """
        self._batch_budget: BatchBudget | None = None
        """What the present step may verify, until its drafts are admitted: vLLM reads
        it.
        """
        self._ranking = ranking
        ranking.bind(
            self._confidence_probs,
            self._batch_draft_capacity,
            self._cu_num_logits,
            self.query_start_loc,
            bonus=self.num_bonus_tokens,
        )
        ranking.check()

    def batches_to_profile(
        self,
        capture_sizes: list[int],
    ) -> Iterator[dict[str, int]]:
        """Name no batches to profile: what steps cost, the controller knows."""
        return iter(())

    def set_initial_cost_curves(self, samples: list[Any]) -> None:
        """Do nothing, see `batches_to_profile`."""

    def add_request(self, req_idx: int) -> None:
        """Do nothing: the chances of a request's drafts come with them."""

    def get_num_tokens(
        self,
        num_tokens_per_req: dict[str, int],
        draft_tokens: dict[str, list[int]],
    ) -> int:
        """Return the tokens of a step, whose requests have room for so many draft
        tokens.
        """
        plan = self._plan
        req_ids = list(num_tokens_per_req)
        num_requests = len(req_ids)
        num_verified = 0
        shape = (3, num_requests)
        shares = np.zeros(shape, dtype=np.int32)
        limits, other_tokens, worth = shares
        drafts = map(draft_tokens.get, req_ids, repeat(()))
        num_drafted = map(len, drafts)
        room = np.fromiter(num_drafted, np.int32, num_requests)
        scheduled = num_tokens_per_req.values()
        tokens = np.fromiter(scheduled, np.int32, num_requests)
        np.subtract(tokens, room, out=other_tokens)
        if plan.budget and not self.drops(req_ids):
            longest, plan_worth, joined = plan.limits_and_worth(req_ids)
            # The kernel reads the row's bits as float32.
            worth.view(np.float32)[:] = plan_worth
            np.minimum(room, longest, out=limits, casting="unsafe")
            bonus_rows = num_requests * self.num_bonus_tokens
            draft_rows = max(0, self._max_total_logits - bonus_rows)
            budget = plan.budget
            if plan.req_ids:
                # Requests that have joined get as much as the others have on average.
                planned_requests = len(plan.req_ids)
                budget += plan.budget * joined // planned_requests
            num_wanted = int(np.add.reduce(limits))
            num_verified = min(budget, num_wanted, draft_rows)
        num_others = int(np.add.reduce(other_tokens))
        planned = len(plan.req_ids) + plan.budget
        most_tokens = max(num_others, planned)
        if most_tokens <= self._largest:
            # The plan was to fit into a graph.
            graph_room = self._largest - num_others
            num_verified = min(num_verified, graph_room)
        self._batch_budget = BatchBudget(req_ids, shares, num_verified)
        return num_others + num_verified

    def reallocate_drafts(
        self,
        req_ids: list[str],
        idx_mapping: torch.Tensor,
    ) -> Any:
        """Admit the drafts; see `AdaptiveVerificationManager`."""
        assert self._batch_budget is not None
        scheduled, shares, budget = self._batch_budget
        self._batch_budget = None
        if scheduled != req_ids:
            places = dict(zip(scheduled, count(), strict=False))
            order = list(map(places.__getitem__, req_ids))
            shares = shares[:, order]
        num_requests = len(req_ids)
        limits = shares[0]
        num_wanted = int(np.add.reduce(limits))
        trims = budget < num_wanted
        slots = idx_mapping.long()
        trimmed_to = budget if trims else -1
        self._ranking.admit(shares, slots, trimmed_to)
        if trims:
            capacity = self._batch_draft_capacity[:num_requests]
            self.admitted = to_host(capacity)
        else:
            self.admitted = torch.from_numpy(limits)
        num_offsets = num_requests + 1
        offsets = self._cu_num_logits[:num_offsets]
        if self._tells_admitted:
            # Who shards a batch's sampling is told what each request has; there all
            # requests have one length.
            return offsets, self.query_start_loc, budget, None
        return offsets, self.query_start_loc, budget

    def record_confidences(self, *given: Any, **named: Any) -> None:
        """Keep the chances of the newest drafts; see `AdaptiveVerificationManager`. The
        step's tokens are drawn by now: nothing here may end it.
        """
        try:
            self._keep_chances(*given, **named)
        except Exception as error:
            self._plan = DraftPlan()
            self._failed(error)

    def _keep_chances(self, confidence_probs: torch.Tensor, input_batch: Any) -> None:
        """Keep the chances of the newest drafts, float32 [requests, steps], and the
        plan for them.
        """
        plan = self._in_force.plan or DraftPlan()
        self._plan = plan
        if plan.budget:
            slots = input_batch.idx_mapping.long()
            batch_chances = confidence_probs[: input_batch.num_reqs]
            self._confidence_probs.index_copy_(0, slots, batch_chances)


def obstacle(
    vllm_config: Any,
    attn_groups: Iterable[Iterable[Any]],
    additional: Any = None,
) -> str | None:
    """Return why all requests of a step must have equally many draft tokens; None: they
    need not. `attn_groups`: vLLM's `AttentionGroup`s; `additional`: the CUDA graphs
    that the model's other attention allows, and whose it is.
    """
    for name, has in ONE_LENGTH.items():
        if has(vllm_config):
            return name
    groups = list(chain.from_iterable(attn_groups))
    planned_on_host = get_query_lens_mismatch_unsupported_backend([groups])
    if planned_on_host:
        return f"{planned_on_host} {HOST_PLANS}"
    graphs = vllm_config.compilation_config.cudagraph_mode
    if not graphs.has_full_cudagraphs():
        return None
    # Beside ranks with drafts, one without them replays a graph for drafts:
    # FlashAttention 3 plans for other tiles.
    data_parallel_size = vllm_config.parallel_config.data_parallel_size
    if data_parallel_size > 1:
        for group in groups:
            head_size = getattr(group.kv_cache_spec, "head_size", 0)
            if head_size <= 64:
                return f"{group.backend.__name__} {SMALL_HEADS}"
    supports = []
    longest = 1 + vllm_config.num_speculative_tokens
    for group in groups:
        builder = group.get_metadata_builder(0)
        arguments = (vllm_config, group.kv_cache_spec)
        # vLLM 0.33 and later
        bound = getattr(builder, "get_varlen_cudagraph_max_query_len", None)
        replayed = bound and bound(*arguments)
        if replayed is None or replayed < longest:
            support = builder.get_cudagraph_support(*arguments)
            supports.append((group.backend.__name__, support))
    if additional is not None:
        support, name = additional
        supports.append((name, support))
    for name, support in supports:
        if support != AttentionCGSupport.ALWAYS:
            return f"{name} {NO_GRAPHS}"
    return None


def with_plain_graphs(manager: Any, unequal: list[Any]) -> None:
    """Let a manager of CUDA graphs capture as well what stock vLLM captures for steps
    without drafts, and of the graphs for unequal lengths, `unequal`, largest first,
    only those that are an eighth apart.
    """
    sizes = [desc.num_tokens for desc in unequal]
    most_requests = min(manager.max_num_reqs, sizes[0])
    plain_sizes = {most_requests}
    for size in sizes:
        # others are of draft lengths
        is_plain = size in _SMALL_SIZES or size % 8 == 0
        if is_plain and size < most_requests:
            plain_sizes.add(size)
    plain = []
    for size in sorted(plain_sizes, reverse=True):
        desc = replace(
            unequal[0],
            num_tokens=size,
            num_reqs=size,
            max_query_len=None,
            uniform_token_count=1,
        )
        plain.append(desc)
    kept_sizes = an_eighth_apart(sizes)
    drafted = []
    for desc in unequal:
        if desc.num_tokens in kept_sizes:
            drafted.append(desc)
    captured = [*drafted, *plain]
    captured.sort(key=lambda desc: -desc.num_tokens)
    manager._capture_descs[CUDAGraphMode.FULL] = captured
    for (num_tokens, _), candidates in manager._candidates.items():
        fitting = []
        for descs in (plain, drafted):
            smallest = _smallest_for(num_tokens, descs)
            if smallest is not None:
                fitting.append(smallest)
        for desc in candidates:
            if desc.cg_mode is not CUDAGraphMode.FULL:
                fitting.append(desc)
        candidates[:] = fitting


def _smallest_for(num_tokens: int, descs: list[Any]) -> Any:
    """Return the description of the smallest graph that holds so many tokens, of some
    that are sorted, largest first; None: none does.
    """
    for desc in reversed(descs):
        if desc.num_tokens >= num_tokens:
            return desc
    return None


@contextlib.contextmanager
def of_one_length(manager: Any) -> Iterator[None]:
    """Hide the draft lengths from a manager of CUDA graphs whose passes are a
    drafter's: before vLLM 0.32 it lists graphs of these lengths less the longest
    one.
    """
    config = manager.vllm_config.speculative_config
    if config is None:
        yield
        return
    longest = manager.vllm_config.num_speculative_tokens
    if manager.decode_query_len > longest:
        yield
        return
    lengths = config.num_speculative_tokens_per_batch_size
    config.num_speculative_tokens_per_batch_size = None
    try:
        yield
    finally:
        config.num_speculative_tokens_per_batch_size = lengths


_RUNNER = "vllm.v1.worker.gpu.model_runner"


@patch(
    f"{_RUNNER}:maybe_create_adaptive_verification_manager",
    since="0.29",
    needs="attn_groups, req_states",
)
def admit_by_worth(stock: Any) -> Any:
    """Without it all requests of a step have equally many draft tokens, needed or not
    (V2 runner). Remove this patch when vLLM lets a speculator of a plug-in choose the
    draft tokens of each request.
    """

    def make(**kwargs: Any) -> Any:
        make_ours = getattr(kwargs["req_states"], ADMITS, stock)
        return make_ours(**kwargs)

    return make


@patch(f"{_RUNNER}:resolve_adaptive_cudagraph_mode", since="0.30", needs="mode")
def allow_no_graphs(stock: Any) -> Any:
    """Without it an engine without full CUDA graphs does not start where each request
    has its own number of draft tokens (V2 runner). Remove this patch when vLLM's
    adaptive verification runs without CUDA graphs.
    """

    def resolve(mode: Any, **kwargs: Any) -> Any:
        if not mode.has_full_cudagraphs():
            return mode
        return stock(mode, **kwargs)

    return resolve


@patch(
    "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager._init_candidates", since="0.29"
)
def capture_plain_steps(stock: Any) -> Any:
    """Without it, where each request has its own number of draft tokens, steps without
    drafts replay graphs that were captured for the longest drafts (V2 runner): their
    attention takes longer, and FlashAttention 3 computes it with the tiles of these
    drafts from a plan for one token, which is wrong with heads of 64. And before vLLM
    0.32 an engine with EAGLE, MTP or DSpark does not start: it lists graphs for 0
    tokens and fewer. Remove this patch when vLLM's adaptive verification captures steps
    without drafts, and 0.32 is the oldest vLLM with a V2 runner.
    """

    def init(self: Any) -> None:
        with of_one_length(self):
            stock(self)
        full = self._capture_descs.get(CUDAGraphMode.FULL, ())
        unequal = [desc for desc in full if desc.max_query_len]
        if unequal:
            with_plain_graphs(self, unequal)

    return init


@patch("vllm.v1.worker.gpu_worker:Worker.execute_dummy_batch", since="0.29")
def idle_with_one_token(stock: Any, runner: Any) -> Any:
    """Without it a data-parallel rank that has no request steps with as many tokens as
    the longest draft, for which the ranks that hold other experts wait (V2 runner).
    Remove this patch when vLLM's idle ranks step with one token.
    """

    def execute_dummy_batch() -> None:
        longest = runner.decode_query_len
        runner.decode_query_len = 1
        try:
            stock()
        finally:
            runner.decode_query_len = longest

    return execute_dummy_batch
