"""The package as pip installs it: sdist, the wheel that is built of it, and an
environment that has nothing else.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from das_adapter.cli import main

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.wheel


@pytest.fixture(scope="module")
def dist(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A directory with the sdist, and the wheel built of it with the tools of this
    environment.
    """
    out = Path(
        request.config.getoption("--wheel-dir") or tmp_path_factory.mktemp("dist")
    ).absolute()
    for old in out.glob("das_adapter-*"):
        old.unlink()
    build = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(out),
        str(ROOT),
    ]
    subprocess.run(build, check=True, capture_output=True, text=True)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("das_adapter-*.whl")
    return path


def test_the_sdist_has_the_source_and_no_weights(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "CMakeLists.txt",
        "LICENSE",
        "csrc/module.cpp",
        "csrc/tuning_header.py",
        "das_adapter/cli.py",
        "das_adapter/core/tuning.py",
        "tests/conftest.py",
    } <= names
    assert not {
        name
        for name in names
        if name.endswith((".safetensors", ".so")) or name.startswith((".ci", "runs"))
    }
    assert path.stat().st_size < 2**20


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(
            next(name for name in names if name.endswith("/METADATA"))
        ).decode()
        entry_points = archive.read(
            next(name for name in names if name.endswith("/entry_points.txt"))
        ).decode()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {
        "das_adapter"
    }
    package = {name for name in names if "dist-info" not in name}
    assert {Path(name).suffix for name in package} == {
        ".html",
        ".json",
        ".py",
        ".so",
        ".typed",
        ".yaml",
    }
    assert not {name for name in package if "test" in name or "benchmark" in name}
    assert len([name for name in package if name.endswith(".so")]) == 1
    assert "das_adapter/nemo_rl/das.yaml" in package, "NeMo-RL's overlay"
    assert "das_adapter/tried_digests.json" in package
    assert wheel.stat().st_size < 2 * 2**20
    for extra in ("plot", "verl", "verl-cpu", "docs", "dev"):
        assert f"Provides-Extra: {extra}" in metadata
    for group in ("vllm.general_plugins", "verl.plugins", "console_scripts"):
        assert f"[{group}]" in entry_points


def test_one_wheel_serves_all_versions_from_3_12_on(wheel: Path) -> None:
    tag = "cp311-cp311" if sys.version_info < (3, 12) else "cp312-abi3"
    assert f"-{tag}-" in wheel.name


def prefix_with(wheel: Path, at: Path) -> Path:
    """Make an environment that has the wheel and what it requires; return its `bin`."""
    venv.create(at, with_pip=False)
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(at / "bin" / "python"),
        "install",
        "-q",
    ]
    subprocess.run(
        [*install, "--only-binary", ":all:", str(wheel)],
        check=True,
        capture_output=True,
        text=True,
    )
    return at / "bin"


def run(bin_: Path, *command: str, **env: str) -> str:
    """Run a command of an environment, without a compiler and without the source tree;
    return what it printed.
    """
    kept = ("HOME", "LANG", "LD_LIBRARY_PATH")
    bare = {
        "PATH": str(bin_),
        "CC": "/none",
        "CXX": "/none",
        **env,
        **{name: os.environ[name] for name in kept if name in os.environ},
    }
    done = subprocess.run(
        command, capture_output=True, text=True, env=bare, cwd=bin_.parent, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_it_drafts_where_there_is_no_compiler(wheel: Path, tmp_path: Path) -> None:
    bin_ = prefix_with(wheel, tmp_path / "prefix")
    python = str(bin_ / "python")
    assert "drafted [10, 11, 12, 13]" in run(
        bin_, python, str(ROOT / "tests/wheel/draft_once.py")
    )
    doctor = (
        "import das_adapter.reports.doctor as d; print(*(f'{f.name} {f.state}' for f in"
        " d.examine()), sep=', ')"
    )
    assert {"das-adapter ok", "native core ok", "vllm broken"} <= set(
        run(bin_, python, "-c", doctor).strip().split(", ")
    )
    assert "das-adapter" in run(bin_, str(bin_ / "das-adapter"), "--help")
    assert "das-adapter bench gate" in run(
        bin_, str(bin_ / "das-adapter"), "bench", "--help"
    )


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_a_checkout_is_installed_and_nothing_stays_when_it_is_uninstalled(
    installer: str, tmp_path: Path
) -> None:
    """Less what it requires, of which the other tests install all."""
    venv.create(tmp_path / "prefix", with_pip=False)
    python = tmp_path / "prefix" / "bin" / "python"
    (packages,) = (tmp_path / "prefix" / "lib").glob("python*/site-packages")
    before = sorted(packages.iterdir())
    tools = Path(sys.executable).parent
    install = {
        "pip": [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "-q",
            "--no-deps",
            str(ROOT),
        ],
        "uv": [
            str(tools / "uv"),
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--python",
            str(python),
            str(ROOT),
        ],
    }
    subprocess.run(install[installer], check=True, capture_output=True, text=True)
    found = run(
        python.parent,
        str(python),
        "-c",
        "import das_adapter._native as native; print(native.__file__)",
    ).strip()
    assert Path(found).parent == packages / "das_adapter"
    assert (python.parent / "das-adapter").exists()
    uninstall = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "uninstall",
        "-q",
        "-y",
        "das-adapter",
    ]
    subprocess.run(uninstall, check=True, capture_output=True, text=True)
    assert sorted(packages.iterdir()) == before
    assert not (python.parent / "das-adapter").exists()


def test_nemo_rls_environments_get_the_wheel_by_one_command(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # with uv
    monkeypatch.setenv(
        "PATH", os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    )
    name = "nemo_rl.models.generation.vllm.vllm_worker_async.VllmAsyncGenerationWorker"
    venv.create(tmp_path / name, with_pip=False)
    command = ["install", "nemo-rl", "--venvs", str(tmp_path)]
    done = CliRunner().invoke(main, [*command, "--from", str(wheel)])
    assert done.exit_code == 0, done.output
    bin_ = tmp_path / name / "bin"
    assert "drafted [10, 11, 12, 13]" in run(
        bin_, str(bin_ / "python"), str(ROOT / "tests/wheel/draft_once.py")
    )


def test_an_engine_drafts_from_its_history_after_its_weights_were_updated_in_place(
    wheel: Path, tmp_path: Path
) -> None:
    """In an environment that has the wheel, and borrows vLLM's packages from this
    one.
    """
    vllm = pytest.importorskip("vllm")
    bin_ = prefix_with(wheel, tmp_path / "prefix")
    (packages,) = (tmp_path / "prefix" / "lib").glob("python*/site-packages")
    (packages / "borrowed.pth").write_text(f"{Path(vllm.__file__).parents[1]}\n")
    (bin_ / "lscpu").symlink_to(shutil.which("lscpu") or "")  # vLLM asks it
    python = str(bin_ / "python")
    example = ROOT / "examples" / "vllm" / "in_place_update.py"
    where = run(
        bin_,
        python,
        "-c",
        "import das_adapter, os; print(os.path.dirname(das_adapter.__file__))",
    ).strip()
    assert Path(where) == packages / "das_adapter"
    assert "broken" not in run(bin_, str(bin_ / "das-adapter"), "doctor")
    # Without the controller, whose decisions depend on how long steps take.
    block = {"drafter": "history", "budget": "uniform", "speculate": "always"}
    printed = run(
        bin_, python, str(example), DAS_CONFIG=json.dumps(block), HF_HUB_OFFLINE="1"
    )
    history = [
        int(found) for found in re.findall(r"from a history of (\d+) tokens", printed)
    ]
    per_forward = [
        float(found) for found in re.findall(r"(\S+) tokens per forward", printed)
    ]
    assert history[0] == 0 < history[1] < history[2]
    assert per_forward[-1] > 1.5
