"""What `das-adapter doctor` says of an installation."""

from __future__ import annotations

from pathlib import Path

import pytest

from das_adapter.tools import doctor
from das_adapter.tools.doctor import PATCHES, PATCHES_OF_V2, equality, examine

ROOT = Path(__file__).resolve().parents[2]


def test_the_installed_package_is_sound() -> None:
    found = {}
    for finding in examine():
        found[finding.name] = finding
        if finding.name == "native core":
            break
    assert [finding.state for finding in found.values()] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("gpu", "environment", "words"),
    [
        ("", {}, "once MKL_CBWR=AUTO,STRICT is set"),
        ("", {"MKL_CBWR": "AUTO,STRICT"}, "writes the same tokens with and without drafts"),
        ("NVIDIA L40S", {"VLLM_BATCH_INVARIANT": "0"}, "the same distribution"),
        ("NVIDIA L40S", {}, "set VLLM_BATCH_INVARIANT=1"),
        ("NVIDIA L40S", {"VLLM_BATCH_INVARIANT": "1"}, "the same tokens"),
    ],
)
def test_it_says_which_equality_the_machine_gives(gpu: str, environment: dict[str, str], words: str) -> None:
    assert words in equality(gpu, environment)


def test_it_says_which_model_runner_an_engine_gets_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for why, words in ((None, "V2 for none, history, eagle3, mtp"), ("vLLM 0.30 is older", "V1: vLLM 0.30 is older;")):
        monkeypatch.setattr(doctor, "needs_v1", lambda _, why=why: why)
        assert doctor._runner().detail.startswith(words)


def test_every_module_that_changes_a_host_is_listed_and_documented() -> None:
    """Those for hosts on a CPU aside."""
    sources = [
        path.relative_to(ROOT / "das_adapter")
        for path in (ROOT / "das_adapter").rglob("*.py")
        if "\n@patch(" in path.read_text()
    ]
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert len(sources) > 12
    assert [source for source in sources if f"`{source}`" not in page and source.parts[1] != "cpu"] == []
    listed = {module for modules in PATCHES.values() for module in modules} | {*PATCHES_OF_V2}
    assert {".".join(source.with_suffix("").parts) for source in sources if source.parts[1] != "cpu"} == listed
