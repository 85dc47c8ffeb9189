"""The native index under sanitizers: damaged files as input, and threads that use it at
the same time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEMORY = ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
THREADS = ["-O1", "-g", "-fsanitize=thread"]
CLEAN = {"PATH": os.environ.get("PATH", os.defpath)}
"""The sanitizer's library must be loaded first, and importing vLLM leaves others in
LD_PRELOAD.
"""


def run(
    name: str, sanitizers: list[str], rounds: int, folder: Path
) -> subprocess.CompletedProcess[str]:
    """Compile a program of tests/native where one of its files has changed, and run it;
    the test is skipped without the compiler's sanitizers.
    """
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("no C++ compiler")
    flags = ["-std=c++17", "-pthread", *sanitizers]
    probe = folder / "probe"
    (folder / "probe.cpp").write_text("int main() {}\n")
    commands = [[compiler, *flags, folder / "probe.cpp", "-o", probe], [probe]]
    if any(
        subprocess.run(command, capture_output=True, check=False, env=CLEAN).returncode
        for command in commands
    ):
        pytest.skip(f"{compiler} has no {sanitizers}")
    sources = [
        ROOT / "tests" / "native" / f"{name}.cpp",
        ROOT / "csrc" / "suffix_index.cpp",
    ]
    tuning = folder / "generated" / "tuning.hpp"
    table = ROOT / "das_adapter" / "core" / "tuning.py"
    script = ROOT / "csrc" / "tuning_header.py"
    subprocess.run([sys.executable, script, table, tuning], check=True)
    headers = [*sorted((ROOT / "csrc").glob("*.hpp")), tuning]
    read = b"".join(path.read_bytes() for path in [*sources, *headers])
    version = subprocess.check_output([compiler, "--version"], env=CLEAN)
    digest = hashlib.sha256(read + version + repr(flags).encode()).hexdigest()
    program = ROOT / "build" / "native" / f"{name}-{digest[:16]}"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        include = [f"-I{ROOT / 'csrc'}", f"-I{tuning.parent}"]
        command = [compiler, *flags, *include, *sources, "-o", folder / name]
        subprocess.run(command, check=True)
        shutil.move(folder / name, program)
    return subprocess.run(
        [program, str(rounds)], capture_output=True, text=True, check=False, env=CLEAN
    )


def test_damaged_files_are_refused_or_harmless_under_sanitizers(tmp_path: Path) -> None:
    done = run("fuzz_index_file", MEMORY, 600, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "600 rounds" in done.stdout


@pytest.mark.long
def test_threads_that_use_one_index_at_the_same_time_never_meet(tmp_path: Path) -> None:
    """Without the lock of `SharedIndex` ThreadSanitizer reports races in each of its
    calls.
    """
    done = run("threads_index", THREADS, 200, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "200 rounds, 0 failures" in done.stdout
