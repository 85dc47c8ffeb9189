"""Models that draft on vLLM's V2 model runner, its own speculators with weights (EAGLE,
MTP, a draft model, DFlash, DSpark) and the policy copy: drafts of the length that the
controller has chosen, drawn with the policy's noise, or with noise of their own where
vLLM's rejection sampler knows their probabilities, and timed.

A step that has no use for drafts costs nothing, as long as what is missed then can be
read later (`reading.py`); the copy misses nothing.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from vllm.distributed.parallel_state import get_tp_group

from das_adapter.config import DasConfig
from das_adapter.engine.controller import EngineController
from das_adapter.engine.plan import DraftPlan, PlanInForce
from das_adapter.engine.requests import warm_up
from das_adapter.engine.v2 import versions
from das_adapter.engine.v2.confidence import DraftConfidence
from das_adapter.engine.v2.reading import (
    Inputs,
    MissedText,
    may_miss_steps,
    of_unequal_lengths,
    reads_text_alone,
)
from das_adapter.engine.v2.sampling_limits import SamplingLimits
from das_adapter.engine.v2.speculator import HistorySpeculator, to_host
from das_adapter.engine.v2.survival import on_all_ranks
from das_adapter.engine.worker import then
from das_adapter.patching import patch

logger = logging.getLogger("das_adapter")


class Call(NamedTuple):
    """A call of the speculator."""

    requests: int
    passes: int
    is_typical: bool
    """Whether it read no prompt and had missed nothing."""
    begin: Any
    """Seconds, or an event of the device's stream; so is `end`."""
    end: Any

    @property
    def ended(self) -> bool:
        """Whether the device has made its passes."""
        return isinstance(self.end, float) or self.end.query()

    @property
    def seconds(self) -> float:
        """How long it took, once it has ended."""
        if isinstance(self.end, float):
            return self.end - self.begin
        return self.begin.elapsed_time(self.end) / 1000


class Speculation:
    """What das-adapter knows of a speculator with a model, and does beside it."""

    def __init__(
        self,
        speculator: Any,
        config: DasConfig,
        texts: torch.Tensor,
        engine: EngineController | None,
        source: HistorySpeculator | None,
        limits: SamplingLimits,
        confidence: DraftConfidence | None,
        in_force: PlanInForce,
        failed: Callable[[Exception], None],
    ) -> None:
        """`speculator`: vLLM's own, or the policy copy; `texts`: int32 [slots, length],
        the text of the request in each slot; `engine`: is told why drafting failed,
        None: another rank decides; `source`: drafts from the history; `confidence`:
        where the controller is asked, and tokens are drawn with the policy's noise;
        `in_force`: the plan of the present step; `failed`: is told why a step ends
        without drafts.
        """
        self._failed = failed
        self._in_force = in_force
        self.speculator = speculator
        self._limits = limits
        self._confidence = confidence
        self._engine = engine
        self._source = source
        self._parallel = config.parallel
        self._follows = getattr(speculator, "follows", True)
        self._most: int = speculator.num_speculative_steps
        fused = versions.has_graphs_of_all_passes(speculator)
        self._makes_all = fused or reads_text_alone(speculator)
        """Whether it makes all its passes whatever it is asked for."""
        self._calls: deque[Call] = deque()
        self._missed: MissedText | None = None
        if may_miss_steps(speculator):
            self._missed = MissedText(speculator, texts)
        self._kinds: torch.Tensor | None = None
        run_speculator.apply(self, owner=speculator)
        if fused and config.controlled:
            pass_by_pass.apply(owner=speculator)
        if source is not None:
            capture_beside.apply(source.capture, owner=speculator)
            speculator.draft_token_confidence_probs = (
                source.draft_token_confidence_probs
            )
        watermarked = versions.is_watermarked(speculator)
        if config.keyed or (tells_probabilities(speculator) and not watermarked):
            draw_as_the_policy.apply(self, owner=speculator)
            if hasattr(speculator, "_sample_logits"):
                draw_in_turn.apply(self, owner=speculator)
        if config.keyed:
            speculator.draft_logits = None

    @property
    def plan(self) -> DraftPlan:
        """What is drafted at the end of the present step."""
        return self._in_force.plan or DraftPlan(self._most, looks_up=False)

    def take_ended_calls(self) -> list[Call]:
        """Return the calls that have ended since the last time; does not wait for the
        device.
        """
        ended = []
        while self._calls and self._calls[0].ended:
            ended.append(self._calls.popleft())
        return ended

    def kinds(self) -> torch.Tensor | None:
        """Return the kinds of the present step's draft tokens, uint8 [requests,
        drafted], on their way to the host as an `Offer` is; None: nothing was drafted,
        or nobody says how sure the model was.
        """
        kinds = self._kinds
        self._kinds = None
        return kinds

    def propose(
        self,
        run: Callable[..., Any],
        inputs: Inputs,
        plan: DraftPlan,
        num_sampled: torch.Tensor,
    ) -> torch.Tensor:
        """Draft by a plan for each request, which got `num_sampled`, int32 [requests];
        return the drafts, int64 [requests, most]. Where it has failed, they are
        tokens that the policy can read. `run`: runs the speculator with some inputs and
        further keywords; it writes its drafts down.
        """
        source = self._source
        own = plan.num_draft_tokens
        if source is not None:
            own = min(own, plan.num_model_tokens)
        confidence = self._confidence if own else None
        if confidence is not None and plan.chances is not None:
            confidence.learn(plan.chances)
        if source is not None:
            source.draft(inputs.batch, num_sampled)
        drafts = self._draft(run, inputs, own)
        if (
            confidence is not None
            and self._engine is not None
            and not warm_up(inputs.batch.req_ids)
        ):
            self._kinds = to_host(confidence.kinds[: len(drafts), :own])
        if source is None:
            return drafts
        if confidence is not None:
            source.put_better_drafts(drafts, own, confidence.chances[: len(drafts)])
        return source.share(len(drafts))

    def without_drafts(self, batch: Any, error: Exception) -> torch.Tensor:
        """End a step in which drafting has failed; return tokens that the policy can
        read, int64 [requests, most].
        """
        if not on_all_ranks(error):
            raise error
        self._failed(error)
        return self._certain(batch)

    def _draft(
        self,
        run: Callable[..., Any],
        inputs: Inputs,
        wanted: int,
    ) -> torch.Tensor:
        batch = inputs.batch
        passes = 1 if self._parallel else max(1, wanted)
        engine = self._engine
        drafts: torch.Tensor = self.speculator.draft_tokens[: batch.num_reqs]
        alone = get_tp_group().world_size == 1
        failed = engine is not None and engine.failed and alone
        if not wanted and (failed or not self._follows):
            return drafts
        if failed:
            return self._certain(batch)
        try:
            missed = self._missed
            if missed is not None and wanted == 0 and missed.may_miss(batch):
                missed.miss(inputs)
                return drafts
            if batch.max_query_len is not None:
                # Requests have their own lengths: FlashAttention 3's plan has as many
                # rows as the policy's graph for these, and a graph of the drafter,
                # which is for one length, has fewer.
                inputs = inputs._replace(batch=of_unequal_lengths(batch))
            read = inputs if missed is None else missed.read_up(inputs)
            is_behind = read is not inputs
            # without graphs, which are of other shapes
            more = {"is_profile": True} if is_behind else {}
            begin = self._now()
            if self._makes_all:
                self.speculator.num_speculative_steps = passes
            self._limits.copy_from_sampler()
            run(read, num_speculative_tokens=wanted, **more)
            if engine is not None and not warm_up(batch.req_ids):
                is_typical = not is_behind and not batch.has_prefill
                call = Call(batch.num_reqs, passes, is_typical, begin, self._now())
                self._calls.append(call)
        except Exception as error:
            if engine is None or not alone:  # the other ranks wait for this one
                raise
            engine.fail(error)
            self._certain(batch)
        finally:
            self.speculator.num_speculative_steps = self._most
        return drafts

    def _certain(self, batch: Any) -> torch.Tensor:
        """Return drafts that nobody has drawn, of a token that the policy can read, and
        tell vLLM's rejection sampler so.
        """
        logits = self.speculator.draft_logits
        if logits is not None:
            logits[batch.idx_mapping] = -torch.inf
            logits[batch.idx_mapping, :, 0] = 0.0
        drafts: torch.Tensor = self.speculator.draft_tokens[: batch.num_reqs]
        return drafts.zero_()

    def draw(
        self,
        logits: torch.Tensor,
        slots: Any,
        positions: Any,
        step: torch.Tensor,
    ) -> Any:
        """Draw a token a row with the noise of the policy, or with vLLM's for drafts
        where its rejection sampler is told the logits, which are changed; `positions`:
        of the token before it; `step`: its place in the draft, of each row or of
        all.
        """
        from vllm.v1.worker.gpu.sample import gumbel

        speculator = self.speculator
        told = self.speculator.draft_logits
        if self._confidence is None:
            versions.predict_acceptance(speculator, logits, slots, step)
        noise: dict[str, Any] = {}
        if told is not None:
            logits = logits.to(told.dtype)
            noise = {"logits_cache": told, "logits_cache_col": step}
        self._limits.apply(logits, slots, speculator.temperature)
        drawn = gumbel.gumbel_sample(
            logits,
            slots,
            speculator.temperature,
            speculator.seeds,
            positions,
            apply_temperature=True,
            is_drafting=told is not None,
            use_fp64=speculator.use_fp64_gumbel,
            **noise,
        )
        if self._confidence is not None:
            self._confidence.judge(logits, drawn, slots, speculator.temperature, step)
        return drawn

    def _now(self) -> Any:
        if self.speculator.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def tells_probabilities(speculator: Any) -> bool:
    """Whether vLLM's rejection sampler is told the probabilities of a speculator's
    drafts, and say which they are.
    """
    logits = speculator.draft_logits
    size = speculator.vllm_config.model_config.get_vocab_size()
    if logits is not None and logits.shape[-1] < size:
        logger.info(
            "das: the drafter's vocabulary is smaller than the policy's, %d of %d",
            logits.shape[-1],
            size,
        )
        # with it vLLM would not write the tokens beyond
        logits = None
        speculator.draft_logits = None
    how = "drawn, and verified by their probabilities"
    if logits is None:
        how = "the model's most likely ones"
    logger.info("das: draft tokens are %s", how)
    return logits is not None


_SPECULATOR = "vllm.v1.worker.gpu.spec_decode.speculator"


@patch(
    f"{_SPECULATOR}:BaseSpeculator.propose",
    since="0.29",
    needs="input_batch, num_sampled, dummy_run",
)
def run_speculator(stock: Any, speculation: Speculation) -> Any:
    """Without it a drafter runs in steps that want no drafts, nobody knows what its
    passes cost, and its failure ends the engine (V2 runner). Remove this patch when
    vLLM lets a step ask for no drafts and survives a drafter's failure.
    """

    def propose(
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        if dummy_run:
            return stock(*args, dummy_run=True, **kwargs)
        read = len(Inputs._fields)

        def run(
            inputs: Inputs,
            num_speculative_tokens: int,
            **more: Any,
        ) -> Any:
            # always, once 0.32 is the oldest vLLM with a V2 runner
            if "num_speculative_tokens" in kwargs:
                more["num_speculative_tokens"] = num_speculative_tokens
            return stock(*inputs, *args[read:], **(kwargs | more))

        plan = speculation.plan
        # vLLM asks for none where no request of the step can use them
        if "num_speculative_tokens" in kwargs:
            plan = plan.at_most(kwargs["num_speculative_tokens"])
        try:
            return speculation.propose(run, Inputs(*args[:read]), plan, args[read])
        except Exception as error:
            return speculation.without_drafts(args[0], error)

    return propose


@patch(
    "vllm.v1.worker.gpu.spec_decode.autoregressive.speculator:AutoRegressiveSpeculator._configure_fused_multi_step_decode",
    since="0.29",
    optional=True,
)
def pass_by_pass(stock: Any) -> Any:
    """Without it, before vLLM 0.32, one CUDA graph holds all passes of EAGLE and MTP:
    they are made however few tokens are wanted (V2 runner). Remove this patch when 0.32
    is the oldest vLLM with a V2 runner.
    """
    return lambda: None


@patch(f"{_SPECULATOR}:BaseSpeculator.capture", since="0.29")
def capture_beside(stock: Any, captured: Callable[[], None]) -> Any:
    """Without it the look-up of drafts beside the model's is not captured as a CUDA
    graph (V2 runner). Remove this patch when vLLM captures the speculators of
    plug-ins.
    """
    return then(stock, captured)


@patch(
    f"{_SPECULATOR}:DraftModelSpeculator.sample_draft",
    since="0.29",
    needs=(
        "hidden_states, sample_src_positions, idx_mapping, temperature, seeds,"
        " draft_step"
    ),
)
def draw_as_the_policy(stock: Any, speculation: Speculation) -> Any:
    """Without it drafters draft the most likely token, which at temperature 1 is often
    not the one that is drawn, or draw outside a request's top-k and top-p (V2 runner).
    Remove this patch when vLLM's V2 drafters draw within these, with the policy's
    noise.
    """
    speculator = speculation.speculator

    logits_of = versions.draft_logits_of(speculator)

    def sample_draft(
        hidden: Any,
        positions: Any,
        slots: Any,
        temperature: Any,
        seeds: Any,
        step: Any,
        *_: Any,
        **more: Any,
    ) -> Any:
        logits = logits_of(hidden, more.get("spec_step_idx", 0))
        return speculation.draw(logits, slots, positions, step)

    return sample_draft


@patch(
    "vllm.v1.worker.gpu.spec_decode.dspark.speculator:DSparkSpeculator._sample_logits",
    since="0.29",
    needs="logits, idx_map, sample_pos, step",
)
def draw_in_turn(stock: Any, speculation: Speculation) -> Any:
    """Without it DSpark, which draws the tokens of a draft one after another, draws as
    the other drafters do without `draw_as_the_policy`. Remove this patch when
    that one is removed.
    """
    speculator = speculation.speculator

    def sample_logits(
        logits: torch.Tensor,
        slots: Any,
        positions: Any,
        step: int,
    ) -> Any:
        # of a smaller vocabulary: how far its tokens stand behind in the policy's
        ahead = speculator.model.draft_id_to_target_id
        if ahead is not None:
            size = len(logits), speculator.vocab_size
            every_logit = logits.new_full(size, -torch.inf)
            policy_tokens = ahead + torch.arange(len(ahead), device=ahead.device)
            logits = every_logit.index_copy_(1, policy_tokens, logits)
        column = speculator._step_cols[step]
        return speculation.draw(logits, slots, positions - 1, column)

    return sample_logits
