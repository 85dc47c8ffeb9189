"""What `das-adapter doctor` says of an installation."""

from __future__ import annotations

import importlib.util

import pytest

from das_adapter import compat
from das_adapter.engine.runner import HOST_PLANS, ONE_LENGTH
from das_adapter.protocol.engine_args import RUNNER_VARIABLE
from das_adapter.reports import doctor
from das_adapter.reports.doctor import equality, examine


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
        (
            "",
            {"MKL_CBWR": "AUTO,STRICT"},
            "writes the same tokens with and without drafts",
        ),
        ("NVIDIA L40S", {"VLLM_BATCH_INVARIANT": "0"}, "the same distribution"),
        ("NVIDIA L40S", {}, "set VLLM_BATCH_INVARIANT=1"),
        ("NVIDIA L40S", {"VLLM_BATCH_INVARIANT": "1"}, "the same tokens"),
    ],
)
def test_it_says_which_equality_the_machine_gives(
    gpu: str, environment: dict[str, str], words: str
) -> None:
    assert words in equality(gpu, environment)


@pytest.mark.parametrize(
    ("others", "state"), [({}, "broken"), ({"nemo_rl": "0.8.0"}, "absent")]
)
def test_only_nemo_rls_driver_needs_no_vllm(
    others: dict[str, str], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "version", others.get)
    assert {finding.name: finding.state for finding in examine()}["vllm"] == state


@pytest.mark.parametrize(
    ("plugins", "state"),
    [
        (None, "ok"),
        ("auto", "ok"),
        ("other, DAS_adapter", "ok"),
        ("none", "broken"),
        ("other", "broken"),
        ("", "broken"),
    ],
)
def test_it_says_where_verl_loads_no_plug_in(
    plugins: str | None, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "version", {"verl": "0.9.1"}.get)
    name = "VERL_USE_EXTERNAL_PLUGINS"
    (
        monkeypatch.delenv(name, raising=False)
        if plugins is None
        else monkeypatch.setenv(name, plugins)
    )
    (found,) = (finding for finding in examine() if finding.name == "plug-in in veRL")
    assert found.state == state
    assert state == "ok" or f"{name}: found {plugins!r}" in found.detail


def test_it_says_which_model_runner_engines_get_and_where_requests_share_a_draft_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat, "version", lambda _: "0.30.0")
    monkeypatch.setattr(compat, "missing", lambda _: [])
    monkeypatch.delenv(RUNNER_VARIABLE, raising=False)
    found = {finding.name: finding.detail for finding in doctor.runners(triton=True)}
    assert found["model runner of history"] == found["model runner of mtp"] == "V2"
    assert found["model runner of self"] == "V2"
    assert {*ONE_LENGTH, f"attention that {HOST_PLANS}"} < {
        *found["one draft length for all requests"].split("; ")
    }
    without = {finding.name: finding.detail for finding in doctor.runners(triton=False)}
    assert (
        without["model runner of history"]
        == "V1: vLLM finds no device that Triton compiles for"
    )
    assert "each request its own number;" in without["drafts of history"]
    assert "one draft length for all requests" not in without


def test_it_lists_what_is_changed_in_the_packages_that_are_installed() -> None:
    listed = doctor.changes()
    assert {change["target"].split(".")[0] for change in listed} <= {
        "vllm",
        "verl",
        "nemo_rl",
        "torch",
    }
    assert all(
        importlib.util.find_spec(change["target"].split(".")[0]) and change["until"]
        for change in listed
    )
