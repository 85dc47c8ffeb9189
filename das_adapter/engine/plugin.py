"""The `vllm.general_plugins` entry point: brings das-adapter into every engine process
whose config asks for it, and lists what it changes in vLLM, in order. Workers change
their own model runner later (`binding.py`).
"""

from __future__ import annotations

from das_adapter.engine.binding import bind_worker, reach_workers
from das_adapter.engine.front_end import (
    allow_look_up,
    choose_runner,
    judge_row_processors,
    keep_draft_lengths,
    label_requests,
    log_figures,
    log_figures_offline,
)
from das_adapter.engine.rehearsal import try_drafts, try_drafts_in_process
from das_adapter.engine.scheduler import (
    follow_steps,
    reserve_draft_slots,
    see_adapters,
    see_weight_calls,
    send_the_plan,
)

FRONT_END = (
    choose_runner,
    allow_look_up,
    keep_draft_lengths,
    judge_row_processors,
    label_requests,
)
ENGINE_CORE = (
    reserve_draft_slots,
    send_the_plan,
    follow_steps,
    see_weight_calls,
    see_adapters,
    try_drafts,
    try_drafts_in_process,
)
WORKERS = (reach_workers, bind_worker)
AT_START = (*FRONT_END, *ENGINE_CORE, *WORKERS)
"""Applied in every process of vLLM, before anything is built."""
IN_FRONT_ENDS = (log_figures, log_figures_offline)
"""Applied when a process imports their modules: few do."""


def register() -> None:
    """Apply the patches; they are inert in an engine without a `das:` block.

    Called by vLLM in the front end, the engine core and every worker, before anything
    is built; a second call changes nothing.
    """
    for patch in AT_START:
        patch.try_apply()
    for patch in IN_FRONT_ENDS:
        patch.when_imported()
