"""The bundle for a GPU machine without a package index has all that is imported there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gpu_bundle
import pytest
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = {
    "gpu.txt": """
        import trl
        import vllm.v1.worker.gpu.model_runner, vllm.v1.worker.gpu_worker
        from vllm import LLM
        from trl import GRPOTrainer
        import das_adapter.engine.v2.worker, das_adapter.engine.plugin
    """,
    "gpu-verl.txt": """
        import verl.trainer.main_ppo, verl.workers.engine_workers
        import verl.workers.rollout.vllm_rollout.vllm_async_server
        import verl.experimental.agent_loop, verl.workers.engine
        import das_adapter.verl.server
    """,
}
"""What processes of a bench import, by the list of packages."""
HIDING = """
import importlib.metadata as metadata, re, sys
from pathlib import Path

def name(text):
    return re.sub(r"[-_.]+", "-", text).lower()

image = Path(sys.argv[1]).read_text().splitlines()[1:]
bundled = [path.name.split("-")[0] for path in Path(sys.argv[2]).glob("*.dist-info")]
# the last three come with the newest of huggingface_hub, the image has another
there = {name(each) for each in (*image, *bundled, "das-adapter", "httpx2", "httpcore2", "truststore")}
hidden = {
    top
    for top, packages in metadata.packages_distributions().items()
    if there.isdisjoint(map(name, packages))
}

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        if path is None and name.split(".")[0] in hidden:
            return None
        return self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""
"""Hides what neither the image nor the bundle has."""


@pytest.mark.long
@pytest.mark.parametrize("packages", IMPORTS)
def test_the_image_and_the_bundle_have_what_a_bench_imports(
    packages: str, tmp_path: Path, newest_env: dict[str, str]
) -> None:
    parts = tmp_path / "parts"
    site = tmp_path / "site"
    image = ROOT / "constraints" / "gpu-image.txt"
    this = ".".join(map(str, sys.version_info[:2]))
    wanted = str(image.with_name(packages))
    for arguments in (
        ["pack", str(parts), "--packages", wanted, "--python", this],
        ["unpack", str(parts), str(site)],
    ):
        done = CliRunner().invoke(gpu_bundle.main, arguments)
        assert done.exit_code == 0, done.output
    assert max(part.stat().st_size for part in parts.glob("part-*")) <= 45 << 20
    paths = [str(site)]
    if packages == "gpu.txt":  # its vLLM needs the newer transformers of the image
        paths.append(newest_env["PYTHONPATH"])
    lines = [line.strip() for line in IMPORTS[packages].splitlines()]
    program = tmp_path / "program.py"
    program.write_text(HIDING + "\n".join(lines))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    imported = subprocess.run(
        [sys.executable, str(program), str(image), str(site)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert imported.returncode == 0, imported.stderr[-4000:]
