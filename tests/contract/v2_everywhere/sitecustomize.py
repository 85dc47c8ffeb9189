"""Have every process of a test run vLLM's V2 model runner on a CPU, see `v2_cpu.py`:
those too that a host starts.

Python imports it at its start where this directory is on PYTHONPATH, and the one above,
too.
"""

from __future__ import annotations

import os
from typing import Any

import wrapt

if os.environ.get("DAS_TEST_V2"):

    @wrapt.when_imported("triton.backends")
    def pretend(_: Any) -> None:
        import v2_cpu  # noqa: F401  # it has Triton take the CPU for a device

    @wrapt.when_imported("vllm.engine.arg_utils")
    def lift(_: Any) -> None:
        import v2_cpu

        v2_cpu.lift_limits()

    @wrapt.when_imported("vllm.v1.worker.cpu_worker")
    def stand_in(_: Any) -> None:
        import v2_cpu

        v2_cpu.stand_in(interpreted=False)
