"""The environment of a veRL run on a machine without an accelerator. Imports nothing."""

from __future__ import annotations


def cpu_env() -> dict[str, str]:
    """Return the environment of every process of a veRL run on CPU."""
    return {
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # the FSDP engine is registered under this name; it runs on CPU as it is
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "MKL_CBWR": "AUTO,STRICT",  # so that logits do not depend on how many rows a matrix product has
        "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than small models run
        "DAS_CPU_WEIGHT_SYNC": "1",  # see das_adapter.engine.cpu_patches
    }
