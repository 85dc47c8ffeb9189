"""Have das-adapter's engines in every process of a test run decide by the same step times on every machine.

Python imports it at its start where this directory is on PYTHONPATH, and the one above, too.
"""

from __future__ import annotations

from typing import Any

import wrapt


@wrapt.when_imported("das_adapter.engine.v1.worker")
def steady(_: Any) -> None:
    import steady_clock

    steady_clock.slow_policy()
