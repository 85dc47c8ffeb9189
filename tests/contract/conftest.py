from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import v2_cpu
from jobs import Engine, engines
from requested import HOST

NEWEST = Path(os.environ.get("DAS_TEST_NEWEST", Path(sys.prefix) / "newest"))
"""Directory of the newest vLLM CPU build, put on top of the environment (`make
env`).
"""
DRAFTERS = (
    Path(__file__).resolve().parents[2] / "examples" / "tiny_math" / "make_drafters.py"
)


@pytest.fixture(scope="session", params=["default", "newest"])
def vllm_env(request: pytest.FixtureRequest) -> dict[str, str]:
    """Environment variables that choose the vLLM build a contract test runs on."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    return {} if request.param == "default" else _newest()


@pytest.fixture(scope="session")
def newest_env() -> dict[str, str]:
    """Environment variables that choose the newest vLLM build."""
    return _newest()


def _newest() -> dict[str, str]:
    if not NEWEST.is_dir():
        pytest.skip(
            f"the newest vLLM CPU build is not in {NEWEST}: make env puts it there"
        )
    # one cache serves one build
    return {
        "PYTHONPATH": str(NEWEST),
        "VLLM_CACHE_ROOT": str(NEWEST / ".cache"),
    }


@pytest.fixture(scope="session")
def engine_of(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[dict[str, str]], Engine]]:
    """Return what runs jobs in an environment. It starts once, and stays while tests
    take turns on vLLM builds.
    """
    with contextlib.ExitStack() as stack:
        running: dict[str, Engine] = {}

        def find(env: dict[str, str]) -> Engine:
            if (key := repr(env)) not in running:
                running[key] = stack.enter_context(
                    engines(env, tmp_path_factory.mktemp("engines"))
                )
            return running[key]

        yield find


@pytest.fixture(scope="session")
def engine(
    vllm_env: dict[str, str], engine_of: Callable[[dict[str, str]], Engine]
) -> Engine:
    """Run a job on a real engine, see jobs.py."""
    return engine_of(vllm_env)


@pytest.fixture(scope="session")
def v2_engine(
    newest_env: dict[str, str], engine_of: Callable[[dict[str, str]], Engine]
) -> Engine:
    """Run a job on a real engine with vLLM's V2 model runner, see v2_cpu.py, whose
    weights may change.
    """
    return engine_of({**newest_env, **v2_cpu.ENV, **HOST})


@pytest.fixture(scope="session")
def vision_engine(
    newest_env: dict[str, str], engine_of: Callable[[dict[str, str]], Engine]
) -> Engine:
    """Run a job as `v2_engine` does, where torchvision is there."""
    vision = Path(sys.prefix) / "vision"
    if not vision.is_dir():
        pytest.skip(f"torchvision is not in {vision}: make long puts it there")
    shim = Path(__file__).parent / "with_vision"
    paths = os.pathsep.join([str(shim), newest_env["PYTHONPATH"], str(vision)])
    return engine_of({**newest_env, **v2_cpu.ENV, **HOST, "PYTHONPATH": paths})


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """Address of a Ray cluster for one job after another; whoever else starts Ray on
    this machine doesn't join it.
    """
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    head = {
        "num_cpus": 2,
        "include_dashboard": False,
        "object_store_memory": 100_000_000,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray._private.utils.write_ray_address", lambda *_, **__: None)
        cluster = Cluster(initialize_head=True, head_node_args=head)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture(scope="session")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny policy's drafters, trained for a moment or made of what its
    texts have most, and of a policy with a layer for `mtp`; pytest's workers share
    it.
    """
    import tiny_models

    out = tmp_path_factory.getbasetemp()
    out = (out.parent if "PYTEST_XDIST_WORKER" in os.environ else out) / "drafters"
    out.mkdir(exist_ok=True)
    with (out / "trained").open("a+") as trained:
        fcntl.flock(trained, fcntl.LOCK_EX)
        # as it is now, not as it was when it was opened
        if not trained.seek(0, os.SEEK_END):
            tiny_models.write("mtp", out / "mtp")
            for method in ("dflash", "dspark"):
                tiny_models.write_parallel(method, out / method)
            briefly = ("--steps", "40", "--tokens", "1024")
            subprocess.run(
                [sys.executable, DRAFTERS, out, *briefly],
                check=True,
                capture_output=True,
            )
            trained.write("yes")
    return out


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return the directory of a tiny policy of some kind, see tiny_models.py."""
    out = tmp_path_factory.mktemp("policies")

    @functools.cache
    def policy(kind: str) -> str:
        import tiny_models

        return tiny_models.write(kind, out / kind)

    return policy
