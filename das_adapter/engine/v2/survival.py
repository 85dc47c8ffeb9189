"""How an engine on vLLM's V2 model runner survives a failure of drafts in the middle of
a step: the step is run again, or its tokens are drawn again, without drafts, and the
engine's scheduler is told that all were rejected.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.worker.gpu import structured_outputs

from das_adapter.engine.recurrent import is_recurrent
from das_adapter.engine.v2.verification import draw_without_drafts
from das_adapter.patching import patch

_TAKING_REQUESTS = {"finish_requests", "free_states", "add_requests", "update_requests"}
"""Methods of vLLM's runner that bring its requests up to date, before anything else of
a step.
"""

_OF_CODE = AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError
"""Errors of code that does not fit together: all ranks run the same code, and raise
together.
"""


def without_drafts(scheduled: Any) -> Any:
    """Return a step (vLLM's `SchedulerOutput`) in which nobody carries a draft."""
    drafts = scheduled.scheduled_spec_decode_tokens
    if not drafts:
        return scheduled
    counts = {}
    for req_id, num_tokens in scheduled.num_scheduled_tokens.items():
        counts[req_id] = num_tokens - len(drafts.get(req_id, ()))
    return replace(
        scheduled,
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens={},
    )


def without_news(scheduled: Any) -> Any:
    """Return a step whose requests the runner has taken already: it brings neither
    requests nor blocks.
    """
    cached = scheduled.scheduled_cached_reqs
    no_blocks = [None] * len(cached.req_ids)
    return replace(
        scheduled,
        finished_req_ids=set(),
        preempted_req_ids=None,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=replace(cached, new_block_ids=no_blocks),
        free_encoder_mm_hashes=[],
        new_block_ids_to_zero=None,
        kv_cache_block_copies=None,
    )


def first_masks(grammar_output: Any, dropped: Mapping[str, Sequence[int]]) -> Any:
    """Return the masks of a step's structured outputs (vLLM's `GrammarOutput`, None:
    there are none) as those of a step without drafts; `dropped`: draft tokens by
    request that it was scheduled with. Of a request there is one mask for each of its
    draft tokens and one more, or as many for each request, of which vLLM takes those
    that it needs.
    """
    if not dropped or grammar_output is None:
        return grammar_output
    if not hasattr(structured_outputs, "_build_grammar_mapping"):
        return grammar_output
    num_masks = []
    for req_id in grammar_output.structured_output_request_ids:
        num_masks.append(1 + len(dropped.get(req_id, ())))
    first_rows = np.cumsum(num_masks) - num_masks
    masks = grammar_output.grammar_bitmask[first_rows]
    return replace(grammar_output, grammar_bitmask=masks)


def on_all_ranks(error: BaseException) -> bool:
    """Return whether each tensor-parallel rank has raised as this one, or there is one
    alone: then all go on alike.
    """
    return get_tp_group().world_size == 1 or isinstance(error, _OF_CODE)


def may_be_repeated(error: BaseException) -> bool:
    """Return whether a step that has raised can be taken again without drafts: the
    runner had taken its requests.
    """
    frames = traceback.extract_tb(error.__traceback__)
    functions = {frame.name for frame in frames}
    return on_all_ranks(error) and _TAKING_REQUESTS.isdisjoint(functions)


class Survival:
    """Runs the steps of a model runner, without drafts once drafting has failed in one
    of them.
    """

    def __init__(self, runner: Any, failed: Callable[[Exception], None]) -> None:
        """`failed`: is told why a step was taken again."""
        self._runner = runner
        # which the step may have changed
        self._has_state = is_recurrent(runner.vllm_config.model_config)
        self._failed = failed
        self.drafts_no_more = False
        """Whether steps verify no drafts and make none."""
        self._dropped: Mapping[str, Sequence[int]] = {}
        """Draft tokens of each request that the present step was scheduled with, and
        does not verify.
        """
        self._manager: Any = None
        """The runner's `adaptive_verification`, which gives each request its number of
        draft tokens, while the runner does without it.
        """

    def run_step(
        self,
        stock: Callable[..., Any],
        scheduled: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Have the runner run a step, with `stock`; without drafts where it fails with
        them.
        """
        drafts = scheduled.scheduled_spec_decode_tokens
        self._dropped = {}
        if not drafts:
            return stock(scheduled, *args, **kwargs)
        if not self.drafts_no_more:
            try:
                return stock(scheduled, *args, **kwargs)
            except Exception as error:
                if self._has_state or not may_be_repeated(error):
                    raise
                self._failed(error)
                scheduled = without_news(scheduled)
        self._dropped = drafts
        return stock(without_drafts(scheduled), *args, **kwargs)

    def as_run(self, scheduled: Any) -> Any:
        """Return a step as it was run: with its drafts or without."""
        if self._dropped:
            return without_drafts(scheduled)
        return scheduled

    def masks(self, grammar_output: Any) -> Any:
        """Return the masks of the present step's structured outputs, as it was
        run.
        """
        return first_masks(grammar_output, self._dropped)

    def stop(self) -> None:
        """Run steps without drafts from the present one on."""
        self.drafts_no_more = True
        if self._runner.adaptive_verification is not None:
            self._manager = self._runner.adaptive_verification
            self._runner.adaptive_verification = None

    def start_again(self) -> None:
        """Run steps with drafts again."""
        self.drafts_no_more = False
        if self._manager is not None:
            self._runner.adaptive_verification = self._manager
            self._manager = None


@patch(
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample",
    since="0.29",
    needs="hidden_states, input_batch, grammar_output",
)
def survive_verification(
    stock: Any,
    runner: Any,
    failed: Callable[[Exception], None],
) -> Any:
    """Without it a failure in the verification of drafts ends the engine (V2 runner).
    Remove this patch when vLLM survives it.
    """

    def sample(
        hidden_states: Any,
        input_batch: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        try:
            return stock(hidden_states, input_batch, *args, **kwargs)
        except Exception as error:
            if not input_batch.num_draft_tokens or not may_be_repeated(error):
                raise
            failed(error)
        verify = runner.rejection_sampler
        runner.rejection_sampler = partial(draw_without_drafts, runner.sampler)
        try:
            return stock(hidden_states, input_batch, *args, **kwargs)
        finally:
            runner.rejection_sampler = verify

    return sample
