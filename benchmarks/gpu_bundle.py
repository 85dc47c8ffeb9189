"""Bundle what `das-adapter bench` needs on a GPU machine that reaches no package index,
in parts that are small enough to be carried one at a time.

    python benchmarks/gpu_bundle.py pack PARTS
    python benchmarks/gpu_bundle.py unpack PARTS SITE

`pack` installs the packages of constraints/gpu.txt (`--packages`: of another list,
constraints/gpu-verl.txt for a training through veRL), leaves out what a bench does not
run, and of vLLM's libraries the machine code of other GPUs, and writes parts and a
manifest. `unpack` writes a directory for PYTHONPATH. The machine's image has the
packages of constraints/gpu-image.txt.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import lzma
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / "constraints" / "gpu.txt"
LEFT_OUT = (
    "vllm/vllm-rs",
    "vllm/third_party/deep_gemm",
    "vllm/third_party/fmha_sm100",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "ray/jars",
    "ray/rllib",
    "bin",
)
"""Of vLLM: its front end in Rust, kernels for FP8 and for Blackwell, and attention for
GPUs before Hopper; of Ray: Java, and algorithms.
"""
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(36, 11, -1)),
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
)
"""Of wheels for the machine; pip matches each exactly."""
MANIFEST = "manifest.json"
MAGIC = struct.pack("<I", 0xBA55ED50)
"""Begin of a fat binary, which has the same kernels for several architectures."""
PTX = 1
CUBIN = 2


class Image(NamedTuple):
    """Code of one architecture in a fat binary."""

    kind: int
    """`PTX`, or machine code, `CUBIN`."""
    arch: int
    """Compute capability, times ten."""
    begin: int
    """Where its content begins in the file."""
    end: int


def fat_binaries(content: bytes) -> Iterator[list[Image]]:
    """Yield the images of each fat binary in a library."""
    at = content.find(MAGIC)
    while at >= 0:
        _, version, header_bytes, size = struct.unpack_from("<IHHQ", content, at)
        begin = at + header_bytes
        end = begin + size
        if version != 1 or end > len(content):
            at = content.find(MAGIC, at + 1)
            continue
        images = []
        while begin < end:
            kind, _, image_header, num_bytes = struct.unpack_from(
                "<HHIQ", content, begin
            )
            (arch,) = struct.unpack_from("<I", content, begin + 28)
            first = begin + image_header
            begin = first + num_bytes
            images.append(Image(kind, arch, first, begin))
        yield images
        at = content.find(MAGIC, end)


def unused(images: list[Image], arch: int) -> list[Image]:
    """Return the images of a fat binary that a GPU does not load: it takes machine code
    of its own architecture, and the newest PTX up to it where there is none.
    """
    used = [image for image in images if image.kind == CUBIN and image.arch == arch]
    if not used:
        ptx = [image for image in images if image.kind == PTX and image.arch <= arch]
        used = [max(ptx, key=lambda image: image.arch)] if ptx else []
    return [image for image in images if image not in used]


def trim(library: Path, arch: int) -> int:
    """Write zeros in place of what a GPU does not load; return how many bytes."""
    content = bytearray(library.read_bytes())
    num_bytes = 0
    for images in list(fat_binaries(bytes(content))):
        for image in unused(images, arch):
            length = image.end - image.begin
            content[image.begin : image.end] = bytes(length)
            num_bytes += length
    if num_bytes:
        library.write_bytes(content)
    return num_bytes


def install(site: Path, packages: Path, python: str | None) -> None:
    """Install a list of packages, without what they depend on; `python`: the version
    that they are for, None: this one.
    """
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
    command += ["--no-compile", "--target", str(site), "-r", str(packages)]
    if python is not None:
        command += ["--only-binary=:all:", "--implementation=cp"]
        command += [f"--python-version={python}"]
        command += [f"--platform={name}" for name in PLATFORMS]
    subprocess.run(command, check=True)


def leave_out(site: Path) -> None:
    """Remove what the bench does not run."""
    for name in LEFT_OUT:
        path = site / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def write_parts(site: Path, out: Path, part_bytes: int) -> None:
    """Write a directory as parts of one compressed archive, and a manifest."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "site.tar.xz"
        with lzma.open(archive, "wb", preset=6) as file:
            with tarfile.open(fileobj=file, mode="w") as tar:
                tar.add(site, arcname=".")
        hashes = {}
        with archive.open("rb") as file:
            for number in itertools.count():
                content = file.read(part_bytes)
                if not content:
                    break
                name = f"part-{number:02}"
                (out / name).write_bytes(content)
                hashes[name] = hashlib.sha256(content).hexdigest()
    (out / MANIFEST).write_text(json.dumps(hashes, indent=1) + "\n")


def read_parts(parts: Path, site: Path) -> None:
    """Write the directory that some parts were made of.

    Raises:
        click.ClickException: a part is missing or damaged.
    """
    hashes = json.loads((parts / MANIFEST).read_text())
    with tempfile.TemporaryFile() as archive:
        for name, expected in hashes.items():
            path = parts / name
            content = path.read_bytes() if path.exists() else b""
            if hashlib.sha256(content).hexdigest() != expected:
                raise click.ClickException(f"{path} is missing, or is damaged")
            archive.write(content)
        archive.seek(0)
        with tarfile.open(fileobj=archive, mode="r:xz") as tar:
            tar.extractall(site, filter="data")


@click.group()
def main() -> None:
    """Pack and unpack what `das-adapter bench` needs on a GPU machine."""


@main.command()
@click.argument("parts", type=click.Path(path_type=Path))
@click.option(
    "--packages",
    type=click.Path(exists=True, path_type=Path),
    default=PACKAGES,
    help="List of packages; default: constraints/gpu.txt.",
)
@click.option("--python", default="3.12", show_default=True, help="Of the machine.")
@click.option("--arch", default=90, show_default=True, help="Of the GPU, times ten.")
@click.option("--part-mib", default=45, show_default=True, help="Size of a part.")
def pack(parts: Path, packages: Path, python: str, arch: int, part_mib: int) -> None:
    """Install the packages, trim them, and write PARTS."""
    this = ".".join(map(str, sys.version_info[:2]))
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        install(site, packages, None if python == this else python)
        leave_out(site)
        saved = sum(trim(library, arch) for library in site.rglob("*.so"))
        click.echo(f"left out {saved / 2**20:.0f} MiB of code for other GPUs")
        write_parts(site, parts, part_mib << 20)
    total = sum(part.stat().st_size for part in parts.glob("part-*"))
    click.echo(f"{parts}: {len(list(parts.glob('part-*')))} parts, {total >> 20} MiB")


@main.command()
@click.argument("parts", type=click.Path(exists=True, path_type=Path))
@click.argument("site", type=click.Path(path_type=Path))
def unpack(parts: Path, site: Path) -> None:
    """Write SITE from PARTS."""
    read_parts(parts, site)
    click.echo(f"PYTHONPATH={site.resolve()}")


if __name__ == "__main__":
    main()
