"""The bundle for a GPU machine without a package index."""

from __future__ import annotations

import struct
from pathlib import Path

import gpu_bundle
import pytest
from click.testing import CliRunner
from gpu_bundle import CUBIN, PTX, fat_binaries, trim, unused

Images = list[tuple[int, int, bytes]]
"""Kind, architecture and content of each image of a fat binary."""


def fat_binary(images: Images) -> bytes:
    """A fat binary as NVIDIA's compiler writes it, as far as it is read."""
    body = b""
    for kind, arch, content in images:
        header = struct.pack("<HHIQ", kind, 0x101, 64, len(content))
        header += bytes(12) + struct.pack("<I", arch)
        body += header.ljust(64, b"\x01") + content
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(path: Path, *binaries: Images) -> Path:
    """A library with code around its fat binaries, and the magic number by chance."""
    content = b"\x7fELF" + gpu_bundle.MAGIC + b"\xff" * 40
    for images in binaries:
        content += fat_binary(images) + b"code"
    path.write_bytes(content)
    return path


def test_a_library_keeps_what_a_gpu_loads_where_it_was(tmp_path: Path) -> None:
    own = [(CUBIN, 80, b"old" * 9), (CUBIN, 90, b"own" * 9), (PTX, 90, b"ptx" * 9)]
    older = [(CUBIN, 80, b"old" * 9), (PTX, 75, b"p75"), (PTX, 80, b"p80")]
    newer = [(CUBIN, 100, b"new" * 9)]
    path = library(tmp_path / "kernels.so", own, older, newer)
    before = path.read_bytes()
    found = list(fat_binaries(before))
    contents = [[before[image.begin : image.end] for image in each] for each in found]
    assert contents == [
        [content for *_, content in each] for each in (own, older, newer)
    ]
    assert [[image.arch for image in unused(each, 90)] for each in found] == [
        [80, 90],
        [80, 75],
        [100],
    ]
    assert trim(path, 90) == 27 + 27 + 27 + 3 + 27
    after = path.read_bytes()
    assert len(after) == len(before)
    assert after.count(b"own") == 9 and after.count(b"p80") == 1
    assert not any(word in after for word in (b"old", b"new", b"ptx", b"p75"))
    assert after.count(b"code") == 3


def test_a_library_without_code_for_gpus_stays_as_it_is(tmp_path: Path) -> None:
    path = library(tmp_path / "plain.so")
    before = path.stat().st_mtime_ns
    assert trim(path, 90) == 0
    assert path.stat().st_mtime_ns == before


def test_parts_give_the_directory_that_they_were_made_of(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "package").mkdir(parents=True)
    (site / "package" / "__init__.py").write_text("answer = 42\n")
    (site / "noise").write_bytes(bytes(range(256)) * 40)
    parts = tmp_path / "parts"
    gpu_bundle.write_parts(site, parts, part_bytes=200)
    assert len(list(parts.glob("part-*"))) > 1
    copy = tmp_path / "copy"
    done = CliRunner().invoke(gpu_bundle.main, ["unpack", str(parts), str(copy)])
    assert done.exit_code == 0 and done.output == f"PYTHONPATH={copy}\n"
    for path in site.rglob("*"):
        if path.is_file():
            assert (copy / path.relative_to(site)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(b"x")])
def test_a_missing_or_damaged_part_is_named(spoil, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "file").write_text("text")
    gpu_bundle.write_parts(site, tmp_path / "parts", part_bytes=64)
    spoil(tmp_path / "parts" / "part-01")
    arguments = ["unpack", str(tmp_path / "parts"), str(tmp_path / "copy")]
    done = CliRunner().invoke(gpu_bundle.main, arguments)
    assert done.exit_code == 1
    assert "part-01 is missing, or is damaged" in done.output
    assert not (tmp_path / "copy").exists()
