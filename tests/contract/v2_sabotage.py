"""Parts of das-adapter that are broken or slowed down on the V2 runner, to see that
nothing depends on them.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import zlib
from collections.abc import Callable
from typing import Any

import torch
from between_rounds import drafter_without_weights
from noting import note_token
from v2_stand_ins import COMPARED
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

from das_adapter.core.backoff import RolloutRest
from das_adapter.core.confidence import Confidence
from das_adapter.engine import recurrent, rehearsal
from das_adapter.engine.alone import SharedHistory
from das_adapter.engine.plan import DraftPlan
from das_adapter.engine.rehearsal import TOKEN
from das_adapter.engine.scheduler import PlanLookup
from das_adapter.engine.v2 import verification
from das_adapter.engine.v2.admission import Admission
from das_adapter.engine.v2.device_index import DeviceIndex
from das_adapter.engine.v2.live import LiveTexts
from das_adapter.engine.v2.neural import Speculation
from das_adapter.engine.v2.ranking import Ranking
from das_adapter.engine.v2.reading import MissedText
from das_adapter.engine.v2.speculator import HistorySpeculator
from das_adapter.engine.v2.step_planner import Output, StepPlanner
from das_adapter.engine.v2.worker import DeviceWorkerState


def garbage_drafts() -> None:
    """Draft arbitrary tokens from the history."""
    stock = DeviceIndex.draft

    def draft(
        self: Any,
        slots: torch.Tensor,
        num_sampled: torch.Tensor,
        total_len: torch.Tensor,
    ) -> Any:
        drafts = stock(self, slots, num_sampled, total_len)
        generator = torch.Generator().manual_seed(int(total_len.sum()))
        drafts.copy_(torch.randint(0, 90, drafts.shape, generator=generator))
        drafts[:, 0] = TOKEN  # which alone the rehearsal's request may write
        self.real[: len(slots)] = drafts.shape[1]
        self.confidence[: len(slots)] = 0.5
        return drafts

    DeviceIndex.draft = draft  # type: ignore[method-assign]


def broken(*_: Any, **__: Any) -> None:
    raise RuntimeError("the drafter is broken on purpose")


def failing_search() -> None:
    """Fail once there is a history."""
    draft = DeviceIndex.draft

    def from_history(self: Any, *args: Any) -> Any:
        return broken() if self.arena.tables.sealed_count.any() else draft(self, *args)

    DeviceIndex.draft = from_history  # type: ignore[method-assign]


def failing_drafter() -> None:
    """Fail once there is a history, and in every eighth draft of a model."""
    failing_search()
    steps = itertools.count(1)
    propose = Speculation.propose

    def by_model(self: Any, run: Any, *args: Any) -> Any:
        return propose(self, run if next(steps) % 8 else broken, *args)

    Speculation.propose = by_model  # type: ignore[method-assign]


def noted(act: Callable[[], None]) -> None:
    """Do something else, and note a model's draft tokens that vLLM's rejection sampler
    comes to.
    """
    act()
    verify = rejection_sampler.rejection_sample

    def verified(
        logits: Any,
        told: Any,
        fed: Any,
        begins: Any,
        pos: Any,
        slots: Any,
        *others: Any,
        **more: Any,
    ) -> Any:
        p = logits.softmax(dim=-1)
        temperature = others[2]
        sampled, counts = verify(logits, told, fed, begins, pos, slots, *others, **more)
        for row, slot in enumerate(slots.tolist()):
            first, end = begins[row : row + 2].tolist()
            for step, at in enumerate(range(first, end - 1)):
                drafted = int(fed[at + 1])
                certain = torch.zeros_like(p[at]).index_fill_(
                    0, fed[at + 1 : at + 2].long(), 1.0
                )
                q = (
                    certain
                    if told is None
                    else (told[slot, step].float() / temperature[slot]).softmax(dim=-1)
                )
                if not note_token("model", drafted, int(sampled[row, step]), p[at], q):
                    break
        return sampled, counts

    rejection_sampler.rejection_sample = verified


def draws_unasked(speculator: Any) -> int:
    """Return how often a model draws a token that nobody wants, where it only reads
    along: vLLM leaves that out from 0.33 on for drafters that read the policy's hidden
    states.
    """
    prefill = getattr(speculator, "_prefill", None)
    return (
        0
        if prefill is not None
        and "skip_sample" in inspect.signature(prefill).parameters
        else 1
    )


def count_unequal() -> None:
    """Count the steps whose requests have unequal numbers of draft tokens, and those
    that end with a speculator's work; a model's calls behind draft tokens, and those of
    them that may replay a CUDA graph of one length; those in which it drew as many
    tokens a request as were wanted, or what it draws unasked; and those of its drafts
    whose tokens do not all have one chance. Sum up which draft tokens of which steps
    are verified.
    """
    admit = Admission.reallocate_drafts
    propose = HistorySpeculator.propose
    by_model = Speculation.propose
    record = Admission.record_confidences
    draw = Speculation.draw
    draws = itertools.count()

    def drafted(self: Any, run: Any, *args: Any) -> Any:
        def ran(inputs: Any, **more: Any) -> Any:
            batch = inputs.batch
            behind = batch.num_draft_tokens > 0
            alike = getattr(batch, "decode_graph_eligible", not batch.has_prefill)
            before = next(draws)
            drafts = run(inputs, **more)
            wanted = more["num_speculative_tokens"]
            exact = next(draws) - before == 1 + (
                wanted or draws_unasked(self.speculator)
            )
            for name, counts in (
                ("behind drafts", behind),
                ("of one length", behind and alike),
                ("as wanted", exact),
            ):
                COMPARED[name] = COMPARED.get(name, 0) + counts
            COMPARED["calls"] = COMPARED.get("calls", 0) + 1
            return drafts

        return by_model(self, ran, *args)

    def drew(self: Any, *args: Any) -> Any:
        next(draws)
        return draw(self, *args)

    def recorded(self: Any, chances: torch.Tensor, batch: Any) -> None:
        """What the tokens are ranked by: of a draft from the history those behind it
        have no chance.
        """
        some = chances[: batch.num_reqs, : self._in_force.num_draft_tokens]
        COMPARED["unlike"] = COMPARED.get("unlike", 0) + (
            len(some[some > 0].unique()) > 1
        )
        COMPARED["behind"] = COMPARED.get("behind", 0) + bool((some == 0).any())
        record(self, chances, batch)

    def proposed(self: Any, *args: Any, **kwargs: Any) -> Any:
        COMPARED["proposed"] = COMPARED.get("proposed", 0) + 1
        return propose(self, *args, **kwargs)

    def admitted(self: Any, *args: Any) -> Any:
        laid_out = admit(self, *args)
        numbers = self.admitted.tolist()
        COMPARED["unequal"] = COMPARED.get("unequal", 0) + (len(set(numbers)) > 1)
        COMPARED["plans"] = zlib.crc32(repr(numbers).encode(), COMPARED.get("plans", 0))
        return laid_out

    # type: ignore[method-assign]
    HistorySpeculator.propose = proposed
    Speculation.propose = drafted
    Speculation.draw = drew  # type: ignore[method-assign]
    Admission.record_confidences = recorded  # type: ignore[method-assign]
    Admission.reallocate_drafts = admitted  # type: ignore[method-assign]


def slow_policy() -> None:
    """Tell the controller that a step takes the same time whatever it carries."""
    steps = itertools.count()
    output = StepPlanner.process_output

    def slowly(self: Any, arrived: Output) -> DraftPlan:
        return output(self, arrived._replace(arrived=0.05 * next(steps)))

    StepPlanner.process_output = slowly  # type: ignore[method-assign]
    count_unequal()


def one_length() -> None:
    """Fail where draft tokens are shared out by worth, so that all requests of a step
    have one length.
    """

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("it does not compile, on purpose")

    Ranking.bind = fail  # type: ignore[method-assign]


def slow_policy_of_one_length() -> None:
    """Both."""
    slow_policy()
    one_length()


def small_chunks() -> None:
    """Verify in chunks of few rows, and count them; all requests of a step have equally
    many draft tokens.
    """
    one_length()
    chunks = rejection_sampler._iter_request_chunks

    def counted(*args: Any) -> Any:
        for chunk in chunks(*args):
            COMPARED["chunks"] = COMPARED.get("chunks", 0) + 1
            yield chunk

    # 20 rows of the policy's vocabulary
    rejection_sampler.MAX_CHUNK_BYTES = 4 * 96 * 20
    rejection_sampler._iter_request_chunks = counted


def any_length(reading_along: bool) -> None:
    """Draft arbitrary numbers of tokens, by the model in most steps, in every rollout;
    where requests may have their own numbers, half of them has one less.
    """
    count_unequal()
    RolloutRest.judge_rollout = lambda *_, **__: False  # type: ignore[method-assign]
    steps = itertools.count()
    output = StepPlanner.process_output

    def arbitrary(self: Any, arrived: Output) -> DraftPlan:
        output(self, arrived)
        if drafts := self.engine.drafts:
            COMPARED["learned"] = int(
                (drafts.confidence.chances != Confidence().chances).sum()
            )
        number = next(steps)
        tokens = (3, 1, 0, 0, 0, 0, 0, 2)[number % 8]
        by_model = number // 8 % 3 > 0
        requests = len(arrived.sampled)
        return DraftPlan(
            tokens,
            by_model * tokens,
            chances=Confidence().chances,
            budget=requests * tokens - requests // 2 if tokens else 0,
        )

    StepPlanner.process_output = arbitrary  # type: ignore[method-assign]
    if reading_along:
        MissedText.may_miss = lambda *_: False  # type: ignore[method-assign]


def changing_lengths() -> None:
    """Draft as many tokens for all requests as no controller would, none among them,
    and count the requests that carry no draft into the step after one in which some of
    theirs were accepted.
    """
    steps = itertools.count()
    output = StepPlanner.process_output
    accepted = dict[str, int]()

    def arbitrary(self: Any, arrived: Output) -> DraftPlan:
        output(self, arrived)
        verified = arrived.step.verified
        for row, req_id in enumerate(arrived.step.req_ids):
            has_none = verified is None or not verified[row]
            count = has_none and accepted.get(req_id, 0) > 0
            name = "plain after accepted"
            COMPARED[name] = COMPARED.get(name, 0) + count
            accepted[req_id] = len(arrived.sampled[row]) - 1
        tokens = (5, 0, 0, 3, 0, 1, 5, 0)[next(steps) % 8]
        return DraftPlan(tokens, budget=tokens * len(arrived.sampled))

    StepPlanner.process_output = arbitrary  # type: ignore[method-assign]


def preempted_now_and_then() -> None:
    """Preempt all requests in every 23rd step, and draft as `changing_lengths`."""
    from vllm.v1.core.sched.scheduler import Scheduler

    changing_lengths()
    steps = itertools.count(1)
    schedule = Scheduler.schedule

    def preempts(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.running and next(steps) % 23 == 0:
            self.reset_prefix_cache(reset_running_requests=True)
        return schedule(self, *args, **kwargs)

    Scheduler.schedule = preempts


def accepted_counts_withheld() -> None:
    """Let no recurrent layer know how many tokens were accepted."""
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    changing_lengths()
    after = MambaHybridModelState.postprocess_state

    def forget(self: Any, *args: Any, **kwargs: Any) -> None:
        after(self, *args, **kwargs)
        self.num_accepted_tokens_gpu.fill_(1)

    MambaHybridModelState.postprocess_state = forget


def plain_without_draft() -> None:
    """Compute requests without a draft as without speculation, as vLLM 0.31 does with
    Gated DeltaNet.
    """
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

    changing_lengths()
    object.__setattr__(recurrent.begin_with_accepted_state, "apply", lambda: None)
    build = GDNAttentionMetadataBuilder.build

    def plain(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafted = kwargs.get("num_decode_draft_tokens_cpu")
        if drafted is not None:
            drafted[drafted == 0] = -1
        return build(self, *args, **kwargs)

    GDNAttentionMetadataBuilder.build = plain


def warmed_up(act: Callable[[], None]) -> None:
    """Do something else, and warm the engine's kernels up as vLLM does on a GPU: with
    requests of its own. Count the texts without tokens that an engine without a host
    takes for history.
    """
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu.warmup import warmup_kernels

    act()
    start = CPUWorker.compile_or_warm_up_model
    add = SharedHistory.add
    torch.accelerator.synchronize = lambda: None

    def warm_up(self: Any) -> Any:
        times = start(self)
        warmup_kernels(self.model_runner, self.execute_model, self.sample_tokens)
        return times

    def counted(self: Any, trajectory: Any) -> None:
        COMPARED["empty"] = COMPARED.get("empty", 0) + (not trajectory.tokens)
        add(self, trajectory)

    # type: ignore[method-assign]
    CPUWorker.compile_or_warm_up_model = warm_up
    SharedHistory.add = counted


def weights_at_one_place(without: bool) -> None:
    """Fail where what a parallel drafter reads the policy's text by has moved;
    `without`: it starts with noise for weights.
    """
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    places = dict[str, int]()
    precompute = DFlashSpeculator._precompute_context_kv

    def at_one_place(self: Any, *args: Any) -> None:
        for name, tensor in vars(self.model.model).items():
            if isinstance(tensor, torch.Tensor):
                assert (
                    places.setdefault(name, tensor.data_ptr()) == tensor.data_ptr()
                ), name
        precompute(self, *args)

    DFlashSpeculator._precompute_context_kv = at_one_place
    if without:
        drafter_without_weights()


def replayed_passes() -> None:
    """Have the policy copy's passes replayed by what stands for CUDA graphs of 1, 4 and
    16 requests: a pass is run for as many rows as its graph has, and reads from where
    it read when it was captured.
    """
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    from das_adapter.engine.v2.copy_drafts import CopySpeculator

    build = CopySpeculator._attention
    addresses = dict[int, list[int]]()
    built = dict[str, Any]()

    class Graphs:
        graphs = (1, 4, 16)

        def __init__(self, speculator: Any) -> None:
            self._speculator = speculator

        def dispatch(self, requests: int, *_: int) -> Any:
            size = next(size for size in self.graphs if size >= requests)
            return BatchExecutionDescriptor(
                CUDAGraphMode.FULL,
                num_tokens=size,
                num_reqs=size,
                uniform_token_count=1,
            )

        def run_fullgraph(self, graph: Any) -> None:
            of = self._speculator
            size = graph.num_tokens
            attention = next(iter(built["attention"].values()))
            slots = of.block_tables.slot_mappings[:, :size]
            read = (
                attention.block_table,
                attention.seq_lens,
                attention.query_start_loc,
                attention.slot_mapping,
                slots,
            )
            at = [tensor.data_ptr() for tensor in read]
            assert addresses.setdefault(size, at) == at
            by_layer = build_slot_mappings_by_layer(slots, of.kv_cache_config)
            of._eagerly(size, size, built["attention"], by_layer, CUDAGraphMode.NONE)
            COMPARED["replayed"] = COMPARED.get("replayed", 0) + 1

    def noted(self: Any, *args: Any) -> Any:
        built["attention"] = build(self, *args)
        return built["attention"]

    CopySpeculator._attention = noted  # type: ignore[method-assign]
    CopySpeculator.init_cudagraph_manager = lambda self, _: setattr(
        self, "decode_cudagraph_manager", Graphs(self)
    )


def failing_once(owner: Any, name: str) -> None:
    """Fail once, after drafts have been verified in some steps: in a method of
    das-adapter, or a function.
    """
    stock = getattr(owner, name)
    calls = itertools.count()

    @functools.wraps(stock)
    def fails(*args: Any, **kwargs: Any) -> Any:
        return broken() if next(calls) == 12 else stock(*args, **kwargs)

    setattr(owner, name, fails)


def without_rehearsal(act: Callable[[], None]) -> None:
    """Do something else, and try no drafts before the first request."""
    act()
    rehearsal.may_rehearse = lambda *_: False


PLACES = {
    "the scheduler's room for drafts": (PlanLookup, "_with_room"),
    "the begin of a step": (DeviceWorkerState, "begin"),
    "the plan that comes with a step": (DeviceWorkerState, "read_plan"),
    "the tokens of a step": (Admission, "get_num_tokens"),
    "the layout of a step": (Admission, "reallocate_drafts"),
    "the verification": (verification, "accept_drawn"),
    "the chances of drafts": (Admission, "_keep_chances"),
    "a look-up": (DeviceIndex, "draft"),
    "the drafts of all ranks": (HistorySpeculator, "share"),
    "the draft of a model": (Speculation, "propose"),
    "what is learned of a step": (StepPlanner, "process_output"),
    "the texts of a step": (LiveTexts, "process_tokens"),
}
"""Of the way of a draft, where it may fail in a later step."""
SABOTAGE = {
    **{
        f"failing once in {place}": functools.partial(failing_once, *found)
        for place, found in PLACES.items()
    },
    "accepted counts withheld": accepted_counts_withheld,
    "any draft length": functools.partial(any_length, False),
    "any draft length, noted verification": functools.partial(
        noted, functools.partial(any_length, False)
    ),
    "any draft length, reading along": functools.partial(any_length, True),
    "any draft length, warmed up": functools.partial(
        warmed_up, functools.partial(any_length, False)
    ),
    "changing lengths of all": changing_lengths,
    "drafter without weights": drafter_without_weights,
    "drafter without weights at one place": functools.partial(
        weights_at_one_place, True
    ),
    "failing drafter": failing_drafter,
    "failing drafter, noted verification": functools.partial(noted, failing_drafter),
    "failing search": failing_search,
    "garbage drafts": garbage_drafts,
    "plain without draft": plain_without_draft,
    "preempted now and then": preempted_now_and_then,
    "replayed passes": replayed_passes,
    "slow policy": slow_policy,
    "slow policy, no rehearsal": functools.partial(without_rehearsal, slow_policy),
    "slow policy of one length": slow_policy_of_one_length,
    "small chunks": small_chunks,
    "weights at one place": functools.partial(weights_at_one_place, False),
}
