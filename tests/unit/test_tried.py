"""It is known of an installed host whether the tests have run on what its code does."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from host_copies import change, copy_of

from das_adapter import compat, tried

SCHEDULER = "v1/core/sched/scheduler.py"


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> None:
    tried.compare.cache_clear()


@pytest.mark.parametrize("host", compat.HOSTS)
def test_the_record_has_every_tried_version_and_all_that_is_relied_on(
    host: str,
) -> None:
    known = tried.recorded(host)
    watched = tried.watched(host)
    assert list(known) and set(known) == set(compat.HOSTS[host].tried), (
        "run scripts/digests.py"
    )
    assert set().union(*known.values()) <= set(watched), "run scripts/digests.py"
    never = {path for path, (_, whole) in watched.items() if whole} - set().union(
        *known.values()
    )
    assert not never, "what no version has, nobody calls"


@pytest.mark.parametrize("host", compat.HOSTS)
def test_the_record_is_that_of_the_installed_version(host: str) -> None:
    found = tried.compare(host)
    if found is None:
        pytest.skip(f"{host} is not installed")
    version = found.installed.split("+")[0]
    if version not in compat.HOSTS[host].tried:
        pytest.skip(f"{host} {version} is not one of the tried versions")
    assert tried.digests(host) == tried.recorded(host)[version], (
        "run scripts/digests.py"
    )
    assert found.state == "tried"


MUTATIONS = {
    "a return value more": (
        "v1/spec_decode/llm_base_proposer.py",
        r"return total_num_output_tokens, token_indices_to_sample, new_cad",
        r"return total_num_output_tokens, token_indices_to_sample, new_cad, None",
        "vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer.set_inputs_first_pass",
    ),
    "a field less": (
        "v1/core/sched/output.py",
        r"    scheduled_spec_decode_tokens: .*\n",
        "",
        "vllm.v1.core.sched.output.SchedulerOutput",
    ),
    "a parameter renamed": (
        "v1/worker/gpu_model_runner.py",
        r"(def _sample\(\s+self,\s+logits: .*\s+)spec_decode_metadata",
        r"\1metadata",
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner._sample",
    ),
    "the number of draft tokens copied": (
        SCHEDULER,
        r"num_spec_tokens_to_schedule=num_spec_tokens_to_schedule",
        r"num_spec_tokens_to_schedule=int(num_spec_tokens_to_schedule)",
        "vllm.v1.core.sched.scheduler.Scheduler.schedule",
    ),
    "a method no longer called": (
        "v1/engine/core.py",
        r"draft_token_ids = self\.model_executor\.take_draft_token_ids\(\)",
        "draft_token_ids = None",
        "vllm.v1.engine.core.EngineCore.post_step",
    ),
}


@pytest.mark.parametrize("build", ["installed", "newest"])
@pytest.mark.parametrize("what", MUTATIONS)
def test_a_change_of_vllm_is_found(what: str, build: str, tmp_path: Path) -> None:
    package = copy_of("vllm", tmp_path, build)
    *mutation, function = MUTATIONS[what]
    change(package, *mutation)
    found = tried.compare("vllm", package)
    assert found is not None
    assert (found.state, found.changed) == (
        f"changed since {found.installed}",
        (function,),
    )
    lacking = list(map(str, compat.lacking("vllm", package)))
    renamed = (
        [f"{function}(logits, spec_decode_metadata)"]
        if what == "a parameter renamed"
        else []
    )
    assert lacking == renamed


def test_the_value_more_that_vllm_0_33_returns_is_found(tmp_path: Path) -> None:
    package = copy_of("vllm", tmp_path, "newest")
    file = "v1/worker/gpu/spec_decode/adaptive_verification.py"
    change(
        package,
        file,
        r"(def reallocate_drafts\((?:.*\n)+?        return \()",
        r"\1None, ",
    )
    found = tried.compare("vllm", package)
    assert found is not None
    path = "vllm.v1.worker.gpu.spec_decode.adaptive_verification.AdaptiveVerificationManager.reallocate_drafts"
    assert found.changed == (path,)


def test_what_is_only_written_otherwise_is_no_change(tmp_path: Path) -> None:
    package = copy_of("vllm", tmp_path)
    change(
        package,
        SCHEDULER,
        r"num_spec_tokens_to_schedule=num_spec",
        "# a comment\n            \\g<0>",
    )
    found = tried.compare("vllm", package)
    assert found is not None and found.changed == ()


@pytest.mark.parametrize(
    ("installed", "code", "state"),
    [
        ("2.1+cpu", {"a": "1", "b": "2"}, "tried"),
        ("2.3", {"a": "1", "b": "2"}, "same code as 2.1"),
        ("2.1.1", {"a": "1", "b": "3"}, "same code as 2.2"),
        (
            "2.2",
            {"a": "1", "b": "4"},
            "changed since 2.2",
        ),  # a build with changes of its own
        ("2.4", {"a": "5", "b": "2"}, "changed since 2.1"),  # nearer than 2.2
        ("2.4", {"a": "1"}, "changed since 2.2"),  # one is gone, of either
    ],
)
def test_what_the_code_does_decides_not_its_number(
    installed: str, code: dict[str, str], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        compat, "HOSTS", {"hostpkg": compat.Host(("hostpkg",), "2.0", ("2.1", "2.2"))}
    )
    monkeypatch.setattr(compat, "version", lambda *_: installed)
    monkeypatch.setattr(
        tried,
        "recorded",
        lambda _: {"2.1": {"a": "1", "b": "2"}, "2.2": {"a": "1", "b": "3"}},
    )
    monkeypatch.setattr(tried, "digests", lambda *_: code)
    found = tried.compare("hostpkg")
    assert found is not None and found.state == state


@pytest.mark.parametrize(
    ("changed", "said"),
    [((), None), (tuple("abcdefg"), "changed since 2.1: a, b, c, d, e and 2 more")],
)
def test_the_log_says_in_one_line_that_the_tests_have_not_run(
    changed: tuple[str, ...],
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(
        tried, "compare", lambda _: tried.Comparison("2.3", "2.1", changed)
    )
    with caplog.at_level(logging.WARNING, "das_adapter"):
        tried.warn("hostpkg")
    lines = [record.getMessage() for record in caplog.records]
    assert lines == (
        []
        if said is None
        else [
            f"das: das-adapter's tests have not run on the code of hostpkg 2.3: {said}"
        ]
    )
