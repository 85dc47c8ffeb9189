"""vLLM's own speculators with weights (EAGLE, MTP, a draft model) on its V2 model runner: drafts of the length that the
controller has chosen, drawn with the policy's noise, and timed.

A step that has no use for drafts costs nothing, as long as what is missed then can be read later (`reading.py`).
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from vllm.distributed.parallel_state import get_tp_group

from das_adapter.config import DasConfig
from das_adapter.engine.v2.reading import Inputs, MissedText, may_miss_steps
from das_adapter.engine.v2.speculator import HistorySpeculator
from das_adapter.patching import patch


class Proposal(NamedTuple):
    """A call of the speculator."""

    requests: int
    passes: int
    seconds: float
    usual: bool
    """Whether it read no prompt and had missed nothing."""


class Beside(NamedTuple):
    """Another source of drafts."""

    source: HistorySpeculator
    worth: Callable[[int], float]
    """Returns how many tokens of the neural drafter's drafts of this length are accepted, about."""


class Speculation:
    """What das-adapter knows of the speculator that vLLM has loaded, and does beside it."""

    def __init__(
        self,
        speculator: Any,
        decodes: Callable[[], bool],
        config: DasConfig,
        texts: torch.Tensor,
        beside: Beside | None,
    ) -> None:
        """
        Args:
            speculator: vLLM's.
            decodes: whether the present step reads no prompt.
            config: the block.
            texts: int32 [slots, length], the text of the request in each slot.
            beside: who drafts as well; None: nobody.
        """
        self.speculator = speculator
        self._tokens, self._beside = config.model_tokens, beside
        self.on_failure: Callable[[Exception], None] | None = None
        """Told why drafting failed; the speculator does not run any more until `resume`."""
        self._decodes, self._failed = decodes, False
        self._most: int = speculator.num_speculative_steps
        self._calls: deque[tuple[int, int, bool, Any, Any]] = deque()
        self._missed = MissedText(speculator, texts) if may_miss_steps(speculator) else None
        run_speculator.apply(self, owner=speculator)
        if beside is not None:
            capture_beside.apply(beside, owner=speculator)
        if config.keyed:
            draw_as_the_policy.apply(speculator, owner=speculator)

    def resume(self) -> None:
        """Draft again, after a weight sync."""
        self._failed = False

    def take(self) -> list[Proposal]:
        """Return the calls that have ended since the last time; does not wait for the device."""
        ended = []
        while self._calls and (isinstance(self._calls[0][-1], float) or self._calls[0][-1].query()):
            requests, passes, usual, begin, end = self._calls.popleft()
            seconds = end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1000
            ended.append(Proposal(requests, passes, seconds, usual))
        return ended

    def propose(
        self, run: Callable[..., Any], inputs: Inputs, wanted: int | None, num_sampled: torch.Tensor
    ) -> torch.Tensor:
        """Draft `wanted` tokens for each request, None: as many as there can be; return them, int64 [requests, most].
        Where it has failed, they are tokens that the policy can read.

        Args:
            run: runs the speculator with some inputs and further keywords; it writes its drafts down.
            num_sampled: int32 [requests], tokens that each request got.
        """
        if self._beside is None or wanted is None:
            return self._draft(run, inputs, wanted)
        source, own = self._beside.source, min(wanted, self._tokens) if getattr(wanted, "by_model", False) else 0
        source.draft(inputs.batch, num_sampled)
        drafts = self._draft(run, inputs, own)
        if own and not self._failed:
            source.take_better(drafts, own, self._beside.worth(own))
        return source.share(inputs.batch.num_reqs)

    def _draft(self, run: Callable[..., Any], inputs: Inputs, wanted: int | None) -> torch.Tensor:
        batch, passes = inputs.batch, max(1, self._most if wanted is None else wanted)
        drafts: torch.Tensor = self.speculator.draft_tokens[: batch.num_reqs]
        if self._failed:
            return drafts.zero_()
        try:
            if self._missed is not None and wanted == 0 and self._missed.may_miss(batch):
                self._missed.miss(inputs)
                return drafts
            read = inputs if self._missed is None else self._missed.read_up(inputs)
            behind = {} if read is inputs else {"is_profile": True}  # without graphs, which are of other shapes
            with self._timed(batch.num_reqs, passes, not behind), self._no_more_than(passes):
                run(read, num_speculative_tokens=wanted, **behind)
        except Exception as error:
            if get_tp_group().world_size > 1:  # the other ranks wait for this one
                raise
            self._failed = True
            if self.on_failure:
                self.on_failure(error)
            drafts.zero_()
        return drafts

    @contextlib.contextmanager
    def _timed(self, requests: int, passes: int, usual: bool) -> Iterator[None]:
        usual, begin = usual and self._decodes(), self._now()
        yield
        self._calls.append((requests, passes, usual, begin, self._now()))

    @contextlib.contextmanager
    def _no_more_than(self, passes: int) -> Iterator[None]:
        """vLLM's draft model makes all its passes whatever it is asked for."""
        if self.speculator.num_extra_query_per_req:
            self.speculator.num_speculative_steps = passes
        try:
            yield
        finally:
            self.speculator.num_speculative_steps = self._most

    def _now(self) -> Any:
        """The present moment: seconds, or an event of the device's stream."""
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
            drafts: torch.Tensor = stock(*args, dummy_run=True, **kwargs)
            return drafts
        read = len(Inputs._fields)

        def run(inputs: Inputs, **more: Any) -> Any:
            return stock(*inputs, *args[read:], **(kwargs | more))

        return speculation.propose(run, Inputs(*args[:read]), kwargs.get("num_speculative_tokens"), args[read])

    return propose


@patch(f"{_SPECULATOR}:BaseSpeculator.capture", since="0.32")
def capture_beside(stock: Any, beside: Beside) -> Any:
    """Without it the look-up of drafts beside the model's is not captured as a CUDA graph (V2 runner). Remove this
    patch when vLLM captures the speculators of plug-ins."""

    @functools.wraps(stock)
    def capture(*args: Any, **kwargs: Any) -> Any:
        beside.source.capture()
        return stock(*args, **kwargs)

    return capture


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
        hidden: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        step: torch.Tensor,
        logits_cache: Any,
        spec_step_idx: int = 0,
        **_: Any,
    ) -> torch.Tensor:
        from vllm.v1.worker.gpu.sample import gumbel

        logits = speculator.compute_draft_logits(hidden, spec_step_idx)
        drawn: torch.Tensor = gumbel.gumbel_sample(
            logits,
            slots,
            temperature,
            seeds,
            positions,
            apply_temperature=True,
            is_drafting=False,
            use_fp64=speculator.use_fp64_gumbel,
        )
        return drawn

    return sample_draft


@patch("vllm.v1.worker.gpu.model_runner:GPUModelRunner.load_model", since="0.32")
def take_loaded_speculator(stock: Any, loaded: Callable[[], None]) -> Any:
    """Without it the drafter's weights are neither synced nor checked. vLLM loads the drafter after the policy (V2
    runner). Remove this patch when vLLM loads and checks a drafter's weights at a weight sync."""

    @functools.wraps(stock)
    def load_model(*args: Any, **kwargs: Any) -> None:
        stock(*args, **kwargs)
        loaded()

    return load_model
