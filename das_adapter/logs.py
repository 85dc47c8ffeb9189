"""The logger of das-adapter, whose warnings are seen whatever a host makes of the root
logger.
"""

from __future__ import annotations

import logging
import sys


class LastResort(logging.Handler):
    """Writes to stderr what no other handler takes.

    Imports of a host may have the root logger and its handlers pass errors alone, as
    the one of veRL's vLLM server does, in the trainer's process too.
    """

    def emit(self, record: logging.LogRecord) -> None:
        logger = logging.getLogger("das_adapter")
        others = [handler for handler in logger.handlers if handler is not self]
        if logger.propagate:
            others += logging.getLogger().handlers
        if any(record.levelno >= other.level for other in others):
            return
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def set_up() -> None:
    """Let warnings pass, and have those written that nobody else writes. A level that
    the user has set stays.
    """
    logger = logging.getLogger("das_adapter")
    if logger.level == logging.NOTSET:
        inherited = logger.getEffectiveLevel()
        logger.setLevel(min(inherited, logging.WARNING))
    handler = LastResort()
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
