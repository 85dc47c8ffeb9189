"""vLLM's V2 model runner on a machine without a GPU: its kernels and das-adapter's run
in Triton's interpreter.

What the interpreter or the CPU platform lack is lifted here: a Triton driver,
asynchronous scheduling, the kernel of top-k and top-p (vLLM has it in PyTorch as well).
In the interpreter a step's time goes into the kernels of the sampler, of the inputs and
of the history: NumPy stands in for them, but for jobs that are `interpreted`; see
`v2_stand_ins.py` and `device_reference.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cpu_platform import exchange_between_experts, keep_asynchronous_scheduling

VARIABLE = "DAS_TEST_V2"
ENV = {
    "TRITON_INTERPRET": "1",
    "TORCH_COMPILE_DISABLE": "1",
    VARIABLE: "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}


def everywhere(newest: dict[str, str]) -> dict[str, str]:
    """Return the environment in which all processes that others start run V2, too;
    `newest`: that of its vLLM build.
    """
    here = Path(__file__).resolve().parent
    return {
        **newest,
        **ENV,
        "PYTHONPATH": os.pathsep.join(
            [str(here / "v2_everywhere"), str(here), newest["PYTHONPATH"]]
        ),
    }


class Driver:
    """What is asked of a Triton driver where nothing is compiled."""

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> Any:
        return SimpleNamespace(backend="cpu", arch="", warp_size=1)


def pretend_driver() -> None:
    """Have Triton take the CPU for a device, so that vLLM finds that it can run."""
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=Driver, compiler=None)


def lift_limits() -> None:
    """Keep asynchronous scheduling on the CPU platform, and top-k and top-p in
    PyTorch.
    """
    import vllm.v1.sample.ops.topk_topp_sampler as top

    top.HAS_TRITON = False
    keep_asynchronous_scheduling()


def stand_in(interpreted: bool) -> None:
    """Put NumPy in the place of kernels of vLLM and of the history; `interpreted`: run
    them all, and hold vLLM's against what stands in for them elsewhere.
    """
    import recurrent_layers
    import v2_stand_ins

    from das_adapter.engine.recurrent import UNFIT_DEVICES

    v2_stand_ins.install(compared=interpreted)
    recurrent_layers.install()
    # whose kernels go on from the last accepted token
    UNFIT_DEVICES.clear()
    exchange_between_experts()
    if not interpreted:
        from device_reference import launch

        from das_adapter.engine.v2.device_index import DeviceIndex

        DeviceIndex._launch = launch


def compared(_: Any) -> dict[str, int]:
    """Return how often, in a worker's process, each of vLLM's kernels was held against
    what stands in for it; and what `v2_sabotage.py` has counted.
    """
    import v2_stand_ins

    return dict(v2_stand_ins.COMPARED)


if os.environ.get(VARIABLE):
    pretend_driver()
