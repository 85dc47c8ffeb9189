"""What the log says of a drafting path that has failed: where, in whose code, and on
which vLLM.
"""

from __future__ import annotations

import logging
import traceback
from pathlib import PurePath

from das_adapter import compat

logger = logging.getLogger("das_adapter")


def place(error: BaseException) -> str:
    """Return the place at which an error was raised, as file, line and function; empty
    where it was not raised.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    last = frames[-1]
    parts = PurePath(last.filename).parts
    path = parts[-1]
    for i, part in enumerate(parts):
        if part in ("vllm", "das_adapter"):
            path = "/".join(parts[i:])
            break
    return f" at {path}:{last.lineno}, in {last.name}"


def log_failure(
    error: BaseException,
    drafter: str,
    consequence: str,
) -> None:
    """Say in one ERROR that drafting has failed, where, and what follows."""
    logger.error(
        "das: the %s drafter failed; %s: vLLM %s%s: %r",
        drafter,
        consequence,
        compat.version("vllm"),
        place(error),
        error,
        exc_info=error,
    )
