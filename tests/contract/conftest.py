from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import v2_cpu

NEWEST = Path(os.environ.get("DAS_TEST_NEWEST", Path(sys.prefix) / "newest"))
"""Directory of the newest vLLM CPU build, put on top of the environment (`make env`)."""
DRAFTERS = Path(__file__).resolve().parents[2] / "examples" / "tiny_math" / "make_drafters.py"


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
        pytest.skip(f"the newest vLLM CPU build is not in {NEWEST}: make env puts it there")
    return {"PYTHONPATH": str(NEWEST), "VLLM_CACHE_ROOT": str(NEWEST / ".cache")}  # one cache serves one build


@pytest.fixture(scope="session")
def engine(
    vllm_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """Run a job on a real engine, see engine.py. Equal jobs run once."""
    with _engines(vllm_env, tmp_path_factory) as run:
        yield run


@pytest.fixture(scope="session")
def v2_engine(
    newest_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """Run a job on a real engine with vLLM's V2 model runner, see v2_cpu.py, whose weights may change."""
    with _engines({**newest_env, **v2_cpu.ENV, "DAS_CPU_WEIGHT_SYNC": "1"}, tmp_path_factory) as run:
        yield run


@pytest.fixture(scope="session")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny policy's drafters, trained for a moment, and of a policy with a layer for `mtp`; pytest's
    workers share it."""
    import tiny_models

    out = tmp_path_factory.getbasetemp()
    out = (out.parent if "PYTEST_XDIST_WORKER" in os.environ else out) / "drafters"
    out.mkdir(exist_ok=True)
    with (out / "trained").open("a+") as trained:
        fcntl.flock(trained, fcntl.LOCK_EX)
        if not trained.seek(0, os.SEEK_END):  # as it is now, not as it was when it was opened
            tiny_models.write("mtp", out / "mtp")
            subprocess.run([sys.executable, DRAFTERS, out, "--steps", "40"], check=True, capture_output=True)
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


@contextlib.contextmanager
def _engines(
    env: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    done: dict[str, list[dict[str, Any]]] = {}
    logs = tmp_path_factory.mktemp("engines")
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "engine.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **env},
    ) as process:

        def run(**job: Any) -> list[dict[str, Any]]:
            if dtype := os.environ.get("DAS_TEST_DTYPE"):  # what a GPU's kernels compute in
                job = {**job, "engine": {"dtype": dtype, **job.get("engine", {})}}
            text = json.dumps(job)
            if text not in done:
                log = logs / f"{len(done)}.log"
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(json.dumps({**job, "log": str(log)}) + "\n")
                process.stdin.flush()
                line = next((x for x in process.stdout if x.startswith(("RESULT ", "FAILED "))), "FAILED to start")
                if line.startswith("FAILED"):
                    raise RuntimeError(f"engine {line}:\n{log.read_text()[-6000:] if log.exists() else ''}")
                done[text] = json.loads(line.removeprefix("RESULT "))
                done[text][0]["log"] = log.read_text()
            return done[text]

        yield run
        process.stdin.close()
