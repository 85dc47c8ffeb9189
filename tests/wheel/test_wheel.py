"""The package as pip installs it: sdist, the wheel that is built of it, and an environment that has nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.wheel


@pytest.fixture(scope="module")
def dist(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist, and the wheel built of it with the tools of this environment."""
    out = Path(request.config.getoption("--wheel-dir") or tmp_path_factory.mktemp("dist")).absolute()
    for old in out.glob("das_adapter-*"):
        old.unlink()
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, text=True)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


def test_the_sdist_has_the_source_and_no_weights(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CMakeLists.txt", "LICENSE", "csrc/module.cpp", "das_adapter/cli.py", "tests/conftest.py"} <= names
    assert not {name for name in names if name.endswith((".safetensors", ".so")) or name.startswith((".ci", "runs"))}
    assert path.stat().st_size < 2**20


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
        entry_points = archive.read(next(name for name in names if name.endswith("/entry_points.txt"))).decode()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"das_adapter"}
    package = {name for name in names if "dist-info" not in name}
    assert {Path(name).suffix for name in package} == {".py", ".so", ".typed", ".yaml"}
    assert not {name for name in package if "test" in name or "benchmark" in name}
    assert len([name for name in package if name.endswith(".so")]) == 1
    assert "das_adapter/nemo_rl/das.yaml" in package, "NeMo-RL's overlay"
    assert wheel.stat().st_size < 2 * 2**20
    for extra in ("plot", "verl", "verl-cpu", "docs", "dev"):
        assert f"Provides-Extra: {extra}" in metadata
    for group in ("vllm.general_plugins", "verl.plugins", "console_scripts"):
        assert f"[{group}]" in entry_points


def test_one_wheel_serves_all_versions_from_3_12_on(wheel: Path) -> None:
    tag = "cp311-cp311" if sys.version_info < (3, 12) else "cp312-abi3"
    assert f"-{tag}-" in wheel.name


def test_it_drafts_where_there_is_no_compiler(wheel: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    venv.create(prefix, with_pip=False)
    python = str(prefix / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--only-binary", ":all:", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, text=True)
    kept = ("HOME", "LANG", "LD_LIBRARY_PATH")
    bare = {"PATH": str(prefix / "bin"), "CC": "/none", "CXX": "/none",
            **{name: os.environ[name] for name in kept if name in os.environ}}  # fmt: skip

    def run(*command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True, env=bare, cwd=tmp_path).stdout

    assert "drafted [10, 11, 12, 13]" in run(python, str(ROOT / "tests/wheel/draft_once.py"))
    doctor = "import das_adapter.tools.doctor as d; print(*(f'{f.name} {f.state}' for f in d.examine()), sep=', ')"
    assert {"das-adapter ok", "native core ok", "vllm broken", "entry points ok"} <= set(
        run(python, "-c", doctor).strip().split(", ")
    )
    assert "das-adapter" in run(str(prefix / "bin" / "das-adapter"), "--help")
