"""What `das-adapter doctor` says of an installation."""

from __future__ import annotations

import importlib.util

import click
import pytest
from click.testing import CliRunner

from das_adapter import compat
from das_adapter.cli import main
from das_adapter.engine.runner import HOST_PLANS, ONE_LENGTH
from das_adapter.protocol.engine_args import RUNNER_VARIABLE
from das_adapter.reports import doctor
from das_adapter.reports.doctor import Finding, equality, examine


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


def test_it_ends_with_a_verdict_and_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat, "version", {"vllm": "0.31.0", "verl": "0.9.1"}.get)
    good = [
        Finding("native core", "ok", "here"),
        Finding("vllm", "tried", "0.31.0"),
        Finding("nemo_rl", "absent", "not installed"),
        Finding("verl", "tried", "0.9.1"),
    ]
    first, last = doctor.verdict(good)
    assert first == "Ready with vllm 0.31.0, verl 0.9.1."
    assert last.startswith("Next: das-adapter config")
    changed = Finding("vllm", "changed since 0.30.0", "", ("a.b",))
    assert "The tests have not run on this version of vllm" in " ".join(
        doctor.verdict([*good, changed])
    )
    broken = Finding("plug-in in veRL", "broken", "it is left out")
    assert doctor.verdict([*good, broken]) == [
        "Not ready: plug-in in veRL.",
        "Next: mend plug-in in veRL (it is left out), and call das-adapter doctor"
        " again.",
    ]


def test_the_command_lists_patches_where_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("das-adapter", "ok", "")])
    plain = CliRunner().invoke(main, ["doctor"]).output
    listed = CliRunner().invoke(main, ["doctor", "--patches"]).output
    assert "until" not in plain and "bind_worker" in listed
    assert plain.rstrip().splitlines()[-1].startswith("Next: ")


@pytest.mark.parametrize(
    "words",
    [
        [],
        *([name] for name in main.commands if name != "bench"),
        ["install", "nemo-rl"],
        ["history", "export"],
    ],
)
def test_the_help_of_every_command_has_an_example(words: list[str]) -> None:
    command: click.Command = main
    for word in words:
        assert isinstance(command, click.Group)
        command = command.commands[word]
    if not command.hidden and words != ["install"]:
        help_text = CliRunner().invoke(main, [*words, "--help"]).output
        assert "\n    das-adapter " in help_text.partition("Example")[2]
