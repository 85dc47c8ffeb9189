"""The patches of patches/vllm, against the newest vLLM build of the test environment."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import NEWEST

ROOT = Path(__file__).resolve().parents[2]
PATCHES = sorted((ROOT / "patches" / "vllm").glob("*.patch"))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_a_patch_applies_and_the_result_is_python(patch: Path, tmp_path: Path) -> None:
    if not NEWEST.is_dir():
        pytest.skip(f"the newest vLLM CPU build is not in {NEWEST}")
    (target,) = (
        line.removeprefix("+++ b/")
        for line in patch.read_text().splitlines()
        if line.startswith("+++ ")
    )
    (tmp_path / target).parent.mkdir(parents=True)
    shutil.copy(NEWEST / target, tmp_path / target)
    # not as a part of this repository
    alone = {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    subprocess.run(
        ["git", "apply", str(patch)],
        cwd=tmp_path,
        check=True,
        env={**os.environ, **alone},
    )
    compile((tmp_path / target).read_text(), target, "exec")
