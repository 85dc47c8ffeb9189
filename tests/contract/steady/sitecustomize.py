"""Have das-adapter's engines in every process of a test run decide by the same step
times on every machine, and hosts start and end sooner: what they import stays, and
looking for garbage in it again and again is a quarter of the time; nobody is started
again and looks for the history of a run that has ended. `DAS_TEST_KILLED_IN` asks for a
run's death.

Python imports it at its start where this directory is on PYTHONPATH, and the one above,
too.
"""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import wrapt

gc.set_threshold(100_000, 20, 20)


@wrapt.when_imported("das_adapter.engine.v1.worker")
def steady(_: Any) -> None:
    import steady_clock

    steady_clock.slow_policy()


@wrapt.when_imported("das_adapter.protocol.spool")
def short(spool: Any) -> None:
    spool.GRACE_S = 2.0


@wrapt.when_imported("das_adapter.service.run_ahead")
def sooner(run_ahead: Any) -> None:
    """Ask for idle replicas more often, and kill the process that writes ahead in this
    step of the run when it has its first text.
    """
    run_ahead.tuning.RUN_AHEAD_POLL_S = 0.01  # a whole rollout takes half a second
    last = int(os.environ.get("DAS_TEST_KILLED_IN", "0"))
    stop = run_ahead.AheadWriter.stop

    def begun(writing: Any, step: int) -> None:
        stop(writing, step)
        if step == last:
            run_ahead.AheadSample.add = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    run_ahead.AheadWriter.stop = begun
