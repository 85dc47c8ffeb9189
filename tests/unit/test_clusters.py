"""Images and cluster files are sound, as far as a machine without Docker, Slurm or
Kubernetes can say, and have room in /dev/shm for Ray's objects and the history.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from das_adapter.config import DasConfig

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
IMAGES = sorted((ROOT / "docker").glob("*.Dockerfile"))
SCRIPTS = sorted(ROOT.glob("examples/**/*.sh"))
GIB = 2**30


def lint(program: str, *words: str) -> None:
    if not (BIN / program).exists():
        pytest.skip(f"{program} is not installed: it is in the extra 'dev'")
    done = subprocess.run(
        [str(BIN / program), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.stem)
def test_images_are_sound(image: Path) -> None:
    lint("hadolint", str(image))


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.stem)
def test_an_image_installs_the_checkout_beside_what_its_base_has_and_asks_the_doctor(
    image: Path,
) -> None:
    text = image.read_text()
    assert "COPY . /opt/das-adapter" in text and "ARG BASE=" in text
    assert re.search(r"pip install \S+ .*(/opt/das-adapter|das_adapter-\*\.whl)", text)
    assert not re.search(r"install .*\b(torch|vllm)\b", text)
    assert text.rstrip().splitlines()[-3].endswith("doctor")
    copied = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "build"} <= set(copied)
    assert not {
        "das_adapter",
        "csrc",
        "CMakeLists.txt",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    } & set(copied)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_are_sound(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    lint("shellcheck", "--severity=warning", str(script))


def needed(object_store: int) -> int:
    """Return the bytes of shared memory for Ray's objects, four generations of a
    history, and a GiB more.
    """
    return object_store + 4 * DasConfig().history.max_bytes + GIB


def test_pods_have_room_in_shared_memory() -> None:
    cluster: dict[str, Any] = yaml.safe_load(
        (ROOT / "examples/cluster/kuberay.yaml").read_text()
    )
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    assert cluster["kind"] == "RayCluster" and len(groups) == 2
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounts = {
            mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]
        }
        volume = next(
            volume for volume in pod["volumes"] if volume["name"] == mounts["/dev/shm"]
        )
        assert volume["emptyDir"]["medium"] == "Memory"
        size = int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi")) * GIB
        assert needed(int(group["rayStartParams"]["object-store-memory"])) <= size
        assert (
            size
            < int(container["resources"]["limits"]["memory"].removesuffix("Gi"))
            * GIB
            / 2
        )


def test_a_slurm_job_asks_for_as_much_shared_memory() -> None:
    text = (ROOT / "examples/cluster/slurm.sh").read_text()
    line = next(line for line in text.splitlines() if line.startswith("NEEDED="))
    asked = [
        "bash",
        "-c",
        (
            f"OBJECT_STORE=64; HISTORY={DasConfig().history.max_bytes // GIB}; {line};"
            " echo $NEEDED"
        ),
    ]
    said = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    assert int(said) * GIB == needed(64 * GIB)
    assert f"HISTORY=${{HISTORY:-{DasConfig().history.max_bytes // GIB}}}" in text


SRUN = """#!{python}
import socket, sys, time
def log(line):
    with open({log!r}, "a") as file:
        print(line.replace("\\n", " "), file=file)
step = " ".join(sys.argv[1:])
log(step)
if "--head" in step and {answers}:
    time.sleep(1)  # a step that does not wait would come first
    log("the head answers")
    server = socket.create_server(("127.0.0.1", {port}))
    server.settimeout(60)
    server.accept()
"""
"""In the place of Slurm's: it writes down what it is asked to run, and Ray's head
answers once, or ends at once.
"""


def slurm(
    directory: Path, answers: bool = True
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the batch script in a directory, on two nodes. Return how it ended, and what
    the steps wrote down.
    """
    stubs = directory / "stubs"
    log = directory / "steps"
    stubs.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    srun = SRUN.format(python=sys.executable, log=str(log), answers=answers, port=port)
    for name, text in {"scontrol": "#!/bin/sh\necho 127.0.0.1\n", "srun": srun}.items():
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    env = os.environ | {
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "CONTAINER": "das.sqsh",
        "PORT": str(port),
    }
    env |= {"SLURM_JOB_NODELIST": "nodes", "SLURM_JOB_NUM_NODES": "2"}
    words = ["bash", str(ROOT / "examples/cluster/slurm.sh"), "python3", "train.py"]
    done = subprocess.run(
        words,
        cwd=directory,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done, log.read_text().splitlines() if log.exists() else []


def test_an_image_that_is_a_file_is_given_to_pyxis_as_a_path(tmp_path: Path) -> None:
    (tmp_path / "das.sqsh").touch()
    done, steps = slurm(tmp_path)
    images = {
        word
        for step in steps
        for word in step.split()
        if word.startswith("--container-image=")
    }
    assert (done.returncode, images) == (
        0,
        {f"--container-image={tmp_path / 'das.sqsh'}"},
    ), done.stderr


def test_an_image_of_a_registry_keeps_its_name(tmp_path: Path) -> None:
    assert "--container-image=das.sqsh " in slurm(tmp_path)[1][-1]


def test_a_slurm_job_does_not_run_in_a_checkout(tmp_path: Path) -> None:
    (tmp_path / "das_adapter").mkdir()
    (tmp_path / "das_adapter/__init__.py").touch()
    done, steps = slurm(tmp_path)
    assert (done.returncode, steps) == (
        1,
        [],
    ) and "is a checkout of das-adapter" in done.stderr


def test_the_commands_step_begins_when_the_head_answers(tmp_path: Path) -> None:
    done, steps = slurm(tmp_path)
    assert done.returncode == 0, done.stderr
    (command,) = (
        i for i, step in enumerate(steps) if step.endswith("python3 train.py")
    )
    assert steps.index("the head answers") < command


def test_a_slurm_job_ends_with_its_head(tmp_path: Path) -> None:
    done, steps = slurm(tmp_path, answers=False)
    assert done.returncode == 1 and "Ray's head on 127.0.0.1 has ended" in done.stderr
    assert not any(step.endswith("python3 train.py") for step in steps)
