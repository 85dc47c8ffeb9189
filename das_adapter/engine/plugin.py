"""The `vllm.general_plugins` entry point: brings das-adapter into every engine process whose config asks for it."""

from __future__ import annotations

from das_adapter.engine.patches import AT_START, AT_START_OF_V2, IN_FRONT_ENDS


def register() -> None:
    """Patch vLLM's worker start and its request check; inert in an engine without a `das:` block.

    Called by vLLM in the front end, the engine core and every worker, before anything is built; a second call changes
    nothing.
    """
    for patch in (*AT_START, *AT_START_OF_V2):
        patch.try_apply()
    for patch in IN_FRONT_ENDS:
        patch.when_imported()
