"""What a release needs agrees, and the address of the repository is filled in where it
belongs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
import release
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "README.md",
    "pyproject.toml",
    "CITATION.cff",
    "CHANGELOG.md",
    "das_adapter/__init__.py",
)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what a release is checked by."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_version_changelog_and_citation_agree() -> None:
    assert not list(release.problems(tag=None))


def test_a_tag_asks_for_the_day_of_the_release_and_the_same_version(copy: Path) -> None:
    ours = release.version()
    changelog = copy / "CHANGELOG.md"
    heading = next(
        line
        for line in changelog.read_text().splitlines()
        if line.startswith(f"## [{ours}]")
    )
    replace(changelog, heading, f"## [{ours}] - unreleased")
    (problem,) = release.problems(f"v{ours}", copy)
    assert "'unreleased'" in problem
    replace(changelog, f"## [{ours}] - unreleased", f"## [{ours}] - 2026-12-01")
    assert not list(release.problems(f"v{ours}", copy))
    (problem,) = release.problems("v9.9.9", copy)
    assert "v9.9.9" in problem


@pytest.mark.parametrize(
    ("file", "old"), [("CITATION.cff", "version: "), ("CHANGELOG.md", "## [")]
)
def test_another_version_in_one_file_is_named(copy: Path, file: str, old: str) -> None:
    ours = release.version()
    replace(copy / file, f"{old}{ours}", f"{old}8.8.8")
    (problem,) = release.problems(None, copy)
    assert file in problem and "8.8.8" in problem and ours in problem


def test_the_address_is_written_once_however_often_it_is_given(copy: Path) -> None:
    release.name("https://example.org/a/das-adapter", copy)
    release.name("https://example.org/b/das-adapter/", copy)
    urls = tomllib.loads((copy / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Repository"] == "https://example.org/b/das-adapter"
    assert urls["Issues"] == "https://example.org/b/das-adapter/issues"
    assert "Papers" in urls
    cited = yaml.safe_load((copy / "CITATION.cff").read_text())
    assert cited["repository-code"] == "https://example.org/b/das-adapter"
    readme = (copy / "README.md").read_text()
    assert (
        "](https://example.org/a/das-adapter/raw/main/docs/pictures/chart_epochs.svg)"
        in readme
    )
    assert "](https://example.org/a/das-adapter/blob/main/docs/install.md)" in readme
    assert not re.findall(r"\]\((?!http)", readme)
    assert "git clone https://example.org/a/das-adapter" in readme


@pytest.mark.parametrize(
    "workflow", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda p: p.name
)
def test_actions_are_pinned_by_the_hash_of_their_commit(workflow: Path) -> None:
    """A tag may come to name other code, which would run beside the right to
    publish.
    """
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    used = [step["uses"] for job in jobs for step in job["steps"] if "uses" in step]
    assert used
    assert [name for name in used if not re.search(r"@[0-9a-f]{40}$", name)] == []


def test_the_workflow_checks_the_tag_and_builds_with_the_address() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    runs = {
        job: "\n".join(step.get("run", "") for step in jobs[job]["steps"])
        for job in jobs
    }
    for job in ("wheels", "sdist"):
        assert "python3 scripts/release.py --repository" in runs[job], job
    assert "python3 scripts/release.py --tag" in runs["ready"]
    assert "ready" in jobs["publish"]["needs"]
    assert "mike deploy" in runs["site"] and "ready" in jobs["site"]["needs"]
    assert {"ubuntu-latest", "ubuntu-24.04-arm"} == set(
        jobs["wheels"]["strategy"]["matrix"]["runner"]
    )


def test_the_site_is_made_where_the_package_is_not_installed() -> None:
    for package in ("mkdocs", "matplotlib"):
        pytest.importorskip(package, reason="the extra 'docs' is not installed")
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"][
        "site"
    ]["steps"]
    (step,) = (step for step in steps if "mike deploy" in step.get("run", ""))
    given = (
        step.get("env", {})
        .get("PYTHONPATH", "/")
        .replace("${{ github.workspace }}", str(ROOT))
    )
    path = os.pathsep.join(
        [given, sysconfig.get_path("purelib"), str(ROOT / "scripts")]
    )
    made = [sys.executable, "-P", "-S", "-c", "import docs_hooks"]
    done = subprocess.run(
        made,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_the_site_is_kept_for_each_version_and_can_be_searched(tmp_path: Path) -> None:
    """As the workflow publishes it, on a branch of a repository of its own."""
    pytest.importorskip("mike", reason="the extra 'docs' is not installed")
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(
        ["git", *who, "commit", "-q", "--allow-empty", "-m", "first"],
        cwd=tmp_path,
        check=True,
    )
    bin_ = str(Path(sys.executable).parent)
    deploy = [
        f"{bin_}/mike",
        "deploy",
        "-F",
        str(ROOT / "mkdocs.yml"),
        "--update-aliases",
        "0.2",
        "latest",
    ]
    env = {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}"}  # mike runs mkdocs
    done = subprocess.run(
        deploy, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

    def published(path: str) -> str:
        show = ["git", "show", f"gh-pages:{path}"]
        return subprocess.run(
            show, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    (entry,) = json.loads(published("versions.json"))
    assert (entry["version"], entry["aliases"]) == ("0.2", ["latest"])
    assert "das-adapter" in published("0.2/index.html")
    found = json.loads(published("0.2/search/search_index.json"))["docs"]
    assert any("keyed noise" in part["text"] for part in found)
