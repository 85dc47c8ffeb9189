"""`das-adapter install nemo-rl`: real environments under NeMo-RL's names, a real wheel,
real uv.

The wheel holds two small modules in the place of the package; tests/wheel installs the
whole one.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from das_adapter.cli import main
from das_adapter.nemo_rl.environments import ACTORS

WORKER = "nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker"
COLLECTOR = "nemo_rl.algorithms.async_utils.AsyncTrajectoryCollector"
OTHER = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"


def wheel(folder: Path, version: str, native: str = "") -> Path:
    """Write a wheel of this version, without a build."""
    info = f"das_adapter-{version}.dist-info"
    files = {
        "das_adapter/__init__.py": f"__version__ = {version!r}\n",
        "das_adapter/_native.py": native,
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: das-adapter\nVersion: {version}\n"
        ),
        f"{info}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag:"
            " py3-none-any\n"
        ),
    }
    digests = {
        name: (
            base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
            .rstrip(b"=")
            .decode()
        )
        for name, text in files.items()
    }
    record = [
        f"{name},sha256={digests[name]},{len(text)}" for name, text in files.items()
    ]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    path = folder / f"das_adapter-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


@pytest.fixture
def venvs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Environments as `uv venv` makes them, without pip: a worker's, the collector's,
    and one that needs nothing.
    """
    # with uv
    monkeypatch.setenv(
        "PATH", os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    )
    for name in (WORKER, COLLECTOR, OTHER):
        venv.create(tmp_path / "venvs" / name, with_pip=False)
    (tmp_path / "venvs" / "notes").mkdir()
    return tmp_path / "venvs"


def installed(venvs: Path, name: str) -> str | None:
    """The version that an environment imports; None: it has none."""
    command = [
        venvs / name / "bin/python",
        "-I",
        "-c",
        "import das_adapter; print(das_adapter.__version__)",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def call(venvs: Path, *options: object) -> Result:
    """Run the command."""
    return CliRunner().invoke(
        main,
        ["install", "nemo-rl", "--venvs", str(venvs), "--json", *map(str, options)],
    )


def test_every_environment_that_needs_it_gets_it(venvs: Path, tmp_path: Path) -> None:
    done = call(venvs, "--from", wheel(tmp_path, "9.8"))
    said = json.loads(done.stdout)
    assert (done.exit_code, said["environments"]) == (
        0,
        {WORKER: "9.8", COLLECTOR: "9.8"},
    )
    assert said["not_built"] == [
        "VllmAsyncGenerationWorker",
        "SyncRolloutActor",
        "ReplayBuffer",
    ]
    assert [installed(venvs, name) for name in (WORKER, COLLECTOR, OTHER)] == [
        "9.8",
        "9.8",
        None,
    ]
    shutil.rmtree(venvs / COLLECTOR)
    assert call(venvs, "--from", wheel(tmp_path, "9.7")).exit_code == 0, (
        "an older version takes a newer one's place"
    )
    assert installed(venvs, WORKER) == "9.7"


def installed_from(folder: Path, origin: dict[str, Any]) -> Path:
    """Return a directory where das-adapter is installed from this origin (PEP 610)."""
    info = folder / "own" / "das_adapter-9.8.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: das-adapter\nVersion: 9.8\n"
    )
    (info / "direct_url.json").write_text(json.dumps(origin))
    return info.parent


def path_with_uv(folder: Path) -> str:
    """Return a `PATH` on which uv says what it was asked for, and fails."""
    uv = folder / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text('#!/bin/sh\necho "asked for $*" >&2\nexit 2\n')
    uv.chmod(0o755)
    return os.pathsep.join((str(uv.parent), os.environ["PATH"]))


@pytest.mark.parametrize("below", [None, "python"])
def test_after_an_installation_from_git_the_same_commit_is_installed(
    below: str | None, venvs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "ssh://git@example.org/das%20adapter.git"
    commit = "0123456789abcdef0123456789abcdef01234567"
    vcs = {"vcs": "git", "requested_revision": "main", "commit_id": commit}
    origin = {"url": url, "vcs_info": vcs, **({"subdirectory": below} if below else {})}
    monkeypatch.syspath_prepend(installed_from(tmp_path, origin))
    monkeypatch.setenv("PATH", path_with_uv(tmp_path))
    said = call(venvs).output.split()
    assert said[-1] == f"git+{url}@{commit}" + (
        f"#subdirectory={below}" if below else ""
    )


def test_a_checkout_with_a_space_in_its_path_is_installed(
    venvs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "das adapter"
    origin = {"url": checkout.as_uri(), "dir_info": {"editable": True}}
    assert "%20" in origin["url"]
    monkeypatch.syspath_prepend(installed_from(tmp_path, origin))
    monkeypatch.setenv("PATH", path_with_uv(tmp_path))
    assert call(venvs).output.rstrip().endswith(f" {checkout}")


def test_what_does_not_run_there_has_failed(venvs: Path, tmp_path: Path) -> None:
    done = call(
        venvs,
        "--from",
        wheel(
            tmp_path, "9.8", native="raise ImportError('built for another Python')\n"
        ),
    )
    assert (
        done.exit_code == 1
        and f"{COLLECTOR}: ImportError: built for another Python" in done.output
    )


def test_a_directory_without_environments_and_a_source_that_is_gone_are_refused(
    venvs: Path, tmp_path: Path
) -> None:
    done = call(tmp_path)
    assert done.exit_code == 1 and "found none of NeMo-RL's environments" in done.output
    done = call(venvs, "--from", tmp_path / "no.whl")
    assert (
        done.exit_code == 1
        and f"{COLLECTOR}: " in done.output
        and "no.whl" in done.output
    )


def test_the_actors_are_those_that_nemo_rl_runs_in_vllms_environment() -> None:
    nemo_rl = importlib.util.find_spec("nemo_rl")
    if nemo_rl is None or not nemo_rl.submodule_search_locations:
        pytest.skip("put a checkout of NVIDIA-NeMo/RL on PYTHONPATH")
    folder = Path(nemo_rl.submodule_search_locations[0])
    source = (folder / "distributed" / "ray_actor_environment_registry.py").read_text()
    found = re.findall(
        r'"[\w.]+\.(\w+)": (?:VLLM_EXECUTABLE|PY_EXECUTABLES\.VLLM),', source
    )
    assert set(found) == set(ACTORS)
