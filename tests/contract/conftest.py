from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NEWEST = Path(sys.prefix) / "newest"
"""Packages of the newest vLLM CPU build, laid over the environment (`make env`)."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "engine" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session", params=["default", "newest"])
def vllm_env(request: pytest.FixtureRequest) -> dict[str, str]:
    """Environment variables that choose the vLLM build a contract test runs on."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    if request.param == "default":
        return {}
    if not NEWEST.is_dir():
        pytest.skip(f"the newest vLLM CPU build is not in {NEWEST}: make env puts it there")
    return {"PYTHONPATH": str(NEWEST)}


@pytest.fixture(scope="session")
def engine(vllm_env: dict[str, str]) -> Callable[..., list[dict[str, Any]]]:
    """Run a job on a real engine, see engine.py. Equal jobs run once."""
    done: dict[str, list[dict[str, Any]]] = {}

    def run(**job: Any) -> list[dict[str, Any]]:
        text = json.dumps(job)
        if text not in done:
            process = subprocess.run(
                [sys.executable, str(Path(__file__).parent / "engine.py")],
                input=text, capture_output=True, text=True, check=False, env={**os.environ, **vllm_env},
            )  # fmt: skip
            line = next((x for x in process.stdout.splitlines() if x.startswith("RESULT ")), None)
            if line is None:
                raise RuntimeError(f"engine failed:\n{process.stderr[-6000:]}")
            done[text] = json.loads(line.removeprefix("RESULT "))
            done[text][0]["log"] = process.stderr
        return done[text]

    return run
