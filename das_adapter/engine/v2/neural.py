"""Models that draft on vLLM's V2 model runner, its own speculators with weights (EAGLE, MTP, a draft model, DFlash,
DSpark) and the policy copy: drafts of the length that the controller has chosen, drawn with the policy's noise, and
timed.

A step that has no use for drafts costs nothing, as long as what is missed then can be read later (`reading.py`); the
copy misses nothing.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from vllm.distributed.parallel_state import get_tp_group

from das_adapter.config import DasConfig
from das_adapter.engine.controller import EngineController
from das_adapter.engine.v2.reading import Inputs, MissedText, may_miss_steps
from das_adapter.engine.v2.speculator import HistorySpeculator
from das_adapter.engine.worker import then
from das_adapter.patching import patch
from das_adapter.protocol.engine_args import DraftTokens


class Call(NamedTuple):
    """A call of the speculator."""

    requests: int
    passes: int
    usual: bool
    """Whether it read no prompt and had missed nothing."""
    begin: Any
    """Seconds, or an event of the device's stream; so is `end`."""
    end: Any

    @property
    def ended(self) -> bool:
        return isinstance(self.end, float) or self.end.query()

    @property
    def seconds(self) -> float:
        """How long it took, once it has ended."""
        return self.end - self.begin if isinstance(self.end, float) else self.begin.elapsed_time(self.end) / 1000


class Speculation:
    """What das-adapter knows of a speculator with a model, and does beside it."""

    def __init__(
        self,
        speculator: Any,
        config: DasConfig,
        texts: torch.Tensor,
        engine: EngineController | None,
        source: HistorySpeculator | None,
    ) -> None:
        """`speculator`: vLLM's own, or the policy copy; `texts`: int32 [slots, length], the text of the request in each
        slot; `engine`: is told why drafting failed, None: another rank decides; `source`: drafts from the history."""
        self.speculator = speculator
        self._engine, self._source, self._parallel = engine, source, config.parallel
        self._follows = getattr(speculator, "follows", True)
        self._most: int = speculator.num_speculative_steps
        self._calls: deque[Call] = deque()
        self._missed = MissedText(speculator, texts) if may_miss_steps(speculator) else None
        run_speculator.apply(self, owner=speculator)
        if source is not None:
            capture_beside.apply(source.capture, owner=speculator)
            speculator.draft_token_confidence_probs = source.draft_token_confidence_probs
        if config.keyed:
            draw_as_the_policy.apply(speculator, owner=speculator)
            if hasattr(speculator, "_sample_logits"):
                draw_in_turn.apply(speculator, owner=speculator)

    def take(self) -> list[Call]:
        """Return the calls that have ended since the last time; does not wait for the device."""
        ended = []
        while self._calls and self._calls[0].ended:
            ended.append(self._calls.popleft())
        return ended

    def propose(self, run: Callable[..., Any], inputs: Inputs, wanted: int, num_sampled: torch.Tensor) -> torch.Tensor:
        """Draft `wanted` tokens for each request, which got `num_sampled`, int32 [requests]; return them, int64
        [requests, most]. Where it has failed, they are tokens that the policy can read. `run`: runs the speculator with
        some inputs and further keywords; it writes its drafts down."""
        source, chosen = self._source, DraftTokens(wanted)
        if source is None:
            self.speculator.draft_token_confidence_probs.fill_(chosen.chance)
            return self._draft(run, inputs, wanted)
        own = min(chosen, chosen.by_model)
        source.draft(inputs.batch, num_sampled)
        drafts = self._draft(run, inputs, own)
        if own:
            source.take_better(drafts, own, chosen.chance)
        return source.share(inputs.batch.num_reqs)

    def _draft(self, run: Callable[..., Any], inputs: Inputs, wanted: int) -> torch.Tensor:
        batch, passes, engine = inputs.batch, 1 if self._parallel else max(1, wanted), self._engine
        drafts: torch.Tensor = self.speculator.draft_tokens[: batch.num_reqs]
        alone = get_tp_group().world_size == 1
        if engine is not None and engine.failed and alone:
            return drafts.zero_()
        if not wanted and not self._follows:
            return drafts
        try:
            if self._missed is not None and wanted == 0 and self._missed.may_miss(batch):
                self._missed.miss(inputs)
                return drafts
            read = inputs if self._missed is None else self._missed.read_up(inputs)
            behind = {} if read is inputs else {"is_profile": True}  # without graphs, which are of other shapes
            begin = self._now()
            if self.speculator.num_extra_query_per_req:  # a draft model makes all its passes whatever it is asked for
                self.speculator.num_speculative_steps = passes
            run(read, num_speculative_tokens=wanted, **behind)
            if engine is not None:
                usual = not behind and not batch.has_prefill
                self._calls.append(Call(batch.num_reqs, passes, usual, begin, self._now()))
        except Exception as error:
            if engine is None or not alone:  # the other ranks wait for this one
                raise
            engine.fail(error)
            drafts.zero_()
        finally:
            self.speculator.num_speculative_steps = self._most
        return drafts

    def _now(self) -> Any:
        if self.speculator.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


_SPECULATOR = "vllm.v1.worker.gpu.spec_decode.speculator"


@patch(
    f"{_SPECULATOR}:BaseSpeculator.propose",
    since="0.32",
    needs="input_batch, num_sampled, num_speculative_tokens, dummy_run",
)
def run_speculator(stock: Any, speculation: Speculation) -> Any:
    """Without it a drafter runs in steps that want no drafts, nobody knows what its passes cost, and its failure ends
    the engine (V2 runner). Remove this patch when vLLM lets a step ask for no drafts and survives a drafter's
    failure."""

    @functools.wraps(stock)
    def propose(*args: Any, dummy_run: bool = False, **kwargs: Any) -> torch.Tensor:
        if dummy_run:
            return stock(*args, dummy_run=True, **kwargs)
        read = len(Inputs._fields)

        def run(inputs: Inputs, **more: Any) -> Any:
            return stock(*inputs, *args[read:], **(kwargs | more))

        return speculation.propose(run, Inputs(*args[:read]), kwargs["num_speculative_tokens"], args[read])

    return propose


@patch(f"{_SPECULATOR}:BaseSpeculator.capture", since="0.32")
def capture_beside(stock: Any, captured: Callable[[], None]) -> Any:
    """Without it the look-up of drafts beside the model's is not captured as a CUDA graph (V2 runner). Remove this
    patch when vLLM captures the speculators of plug-ins."""
    return then(stock, captured)


@patch(
    f"{_SPECULATOR}:DraftModelSpeculator.sample_draft",
    since="0.32",
    needs="hidden_states, sample_src_positions, idx_mapping, temperature, seeds",
)
def draw_as_the_policy(stock: Any, speculator: Any) -> Any:
    """Without it drafters draft the most likely token, which at temperature 1 is often not the one that is drawn (V2
    runner). Remove this patch when vLLM's V2 drafters draw with the policy's noise."""

    @functools.wraps(stock)
    def sample_draft(
        hidden: Any, positions: Any, slots: Any, temperature: Any, seeds: Any, *_: Any, spec_step_idx: int = 0
    ) -> Any:
        return _draw(speculator, speculator.compute_draft_logits(hidden, spec_step_idx), slots, positions)

    return sample_draft


@patch(
    "vllm.v1.worker.gpu.spec_decode.dspark.speculator:DSparkSpeculator._sample_logits",
    since="0.32",
    needs="logits, idx_map, sample_pos",
)
def draw_in_turn(stock: Any, speculator: Any) -> Any:
    """As `draw_as_the_policy`, for DSpark, which draws the tokens of a draft one after another. Remove this patch when
    `draw_as_the_policy` is removed."""

    @functools.wraps(stock)
    def sample_logits(logits: torch.Tensor, slots: Any, positions: Any, *_: Any) -> Any:
        ahead = speculator.model.draft_id_to_target_id
        if ahead is not None:  # of a smaller vocabulary: where its tokens stand in the policy's
            every = logits.new_full((len(logits), speculator.vocab_size), -torch.inf)
            logits = every.index_copy_(1, ahead + torch.arange(len(ahead), device=ahead.device), logits)
        return _draw(speculator, logits, slots, positions - 1)

    return sample_logits


def _draw(speculator: Any, logits: Any, slots: Any, positions: Any) -> Any:
    """Draw a token a row with the noise of the policy; `positions`: of the token before it."""
    from vllm.v1.worker.gpu.sample import gumbel

    return gumbel.gumbel_sample(
        logits,
        slots,
        speculator.temperature,
        speculator.seeds,
        positions,
        apply_temperature=True,
        is_drafting=False,
        use_fp64=speculator.use_fp64_gumbel,
    )
