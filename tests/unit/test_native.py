"""The native index under the address and undefined-behaviour sanitizers, with damaged files as input."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = ["-std=c++17", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-pthread"]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not found:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.cpp").write_text("int main() {}\n")
    probe = subprocess.run([found, *FLAGS, "probe.cpp", "-o", "probe"], cwd=folder, capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"{found} has no address and undefined-behaviour sanitizers")
    return found


def test_damaged_files_are_refused_or_harmless_under_sanitizers(compiler: str, tmp_path: Path) -> None:
    program = tmp_path / "fuzz"
    sources = [ROOT / "tests" / "native" / "fuzz_index_file.cpp", ROOT / "csrc" / "suffix_index.cpp"]
    subprocess.run([compiler, *FLAGS, f"-I{ROOT / 'csrc'}", *sources, "-o", program], check=True)
    # The sanitizer's library must be loaded first, and importing vLLM leaves others in LD_PRELOAD.
    run = subprocess.run([program, "600"], capture_output=True, text=True, check=False, env={})
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    assert "600 rounds" in run.stdout
