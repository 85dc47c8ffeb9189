"""The page of `das-adapter report`, as a browser draws it, and the series behind its
figures.
"""

from __future__ import annotations

import html
import itertools
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from das_adapter.cli import main
from das_adapter.errors import DasError
from das_adapter.protocol import decision_log
from das_adapter.protocol.decision_log import (
    CountsRecord,
    DecisionLog,
    LoggedRollout,
    RequestRecord,
    RunRecord,
    StepRecord,
    WeightSyncRecord,
    read,
)
from das_adapter.reports import report, run_series

BROWSER = next(
    filter(
        None,
        map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome")),
    ),
    None,
)
# What a browser has drawn: per figure its traces with decoded coordinates, and its
# axes' titles.
READ_BACK = """<script>
window.addEventListener("load", () => {
  const drawn = {};
  for (const gd of document.querySelectorAll(".js-plotly-plot")) {
    drawn[gd.id] = {
      traces: gd._fullData.map(t => ({name: t.name, type: t.type, x: Array.from(t.x || []), y: Array.from(t.y || [])})),
      axes: Array.from(gd.querySelectorAll(".xtitle, .ytitle, [class*='title']"), t => t.textContent),
      marks: gd.querySelectorAll(".point, .js-line, .hm image").length,
      boxes: Array.from(gd.querySelectorAll(".legend, .xtitle, .ytitle, .x2title, .y2title, .y3title, .annotation-text, .updatemenu-container"), t => {
        const box = t.getBoundingClientRect();
        return [box.left, box.top, box.right, box.bottom, t.textContent];
      }),
      buttons: Array.from(gd.querySelectorAll(".updatemenu-item-text"), t => t.textContent),
    };
  }
  const answer = document.createElement("pre");
  answer.id = "read-back";
  answer.textContent = JSON.stringify(drawn);
  document.body.append(answer);
});
</script>"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> list[LoggedRollout]:
    """Four training steps over two problems in two engines: each problem has two
    visits, of which the second is accepted better; in the third step the drafter costs
    more than it saves.
    """
    directory = tmp_path_factory.mktemp("run")
    for engine in range(2):
        log = DecisionLog(str(directory))
        log.path = directory / f"decisions-{engine}.jsonl"
        for version, problem in ((1, 7), (2, 8), (3, 7), (4, 8)):
            begin = 100.0 * version
            kept = 6 if version > 2 else 2
            for i in range(40):
                log.add(StepRecord(begin + i, 4, 12, 8, kept, 0.5, 0.4))
            for i in range(4):
                log.add(
                    RequestRecord(
                        problem, i % 3, 100, 80, 10 * kept, begin, begin + 10 * (i + 1)
                    )
                )
            stats = {
                "request_forwards": 160,
                "drafted_forwards": 160,
                "tokens": 160 + 40 * kept,
                "draft_tokens": 320,
                "accepted_tokens": 40 * kept,
                "busy_seconds": 20.0,
                "propose_seconds": [0.1],
                "history_requests": 4,
                "history_hits": 4 if version > 2 else 0,
                "history_tokens": 800 * version,
                "neural_counts": (100, 60),
            }
            log.add(CountsRecord(stats))
            stopped = (
                "speculation cost 1.00 s in 2.00 s of drafted steps"
                if version == 3
                else None
            )
            log.add(WeightSyncRecord(version, None, saved=2.5, stopped=stopped))
    return read(directory)


def test_acceptance_is_told_apart_by_step_epoch_and_source(
    run: list[LoggedRollout],
) -> None:
    steps = run_series.by_training_step(run)
    assert [
        (s["version"], s["acceptance"].share, s["history_hits"]) for s in steps
    ] == [
        (1, 0.25, 0.0),
        (2, 0.25, 0.0),
        (3, 0.75, 1.0),
        (4, 0.75, 1.0),
    ]
    assert [(s["engines"], s["requests"]) for s in steps] == [(2, 8)] * 4
    assert [s["tokens_per_forward"] for s in steps] == [1.5, 1.5, 2.5, 2.5]
    assert [(s["decode_seconds"], s["saved_seconds"]) for s in steps] == [
        (40.0, 5.0)
    ] * 4
    assert run_series.by_epoch(run) == [("1", 1280, 320), ("2", 1280, 960)]
    assert [(r.kind, r.share) for r in run_series.by_source(run)] == [
        ("history", pytest.approx((1280 - 480) / (2560 - 800))),
        ("neural drafter", 0.6),
    ]


def test_an_alarm_says_in_words_why_and_when_and_a_loss_is_none(
    run: list[LoggedRollout], tmp_path: Path
) -> None:
    assert run_series.notes(run) == [
        ("note", "speculation cost 1.00 s in 2.00 s of drafted steps", [3])
    ]
    report.write(run, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "No alarm" in page and '<div class="alarm">' not in page
    assert '<div class="note"><b>Training step 3:</b> speculation cost 1.00 s' in page
    useless = {"draft_tokens": 1000, "drafted_forwards": 200, "accepted_tokens": 0}
    ((kind, reason, _),) = run_series.notes(
        [LoggedRollout("a", counts=[useless]), LoggedRollout("b", counts=[useless])]
    )
    assert (
        kind == "alarm"
        and reason == "acceptance collapsed: 0 accepted tokens of 400 drafts"
    )
    collapsed = {
        **useless,
        "drafted_forwards": 400,
        "alarm": (why := "acceptance collapsed: 0 of 400 drafts"),
    }
    over = [
        LoggedRollout(
            "a",
            run[0].steps,
            run[0].requests,
            [collapsed],
            WeightSyncRecord(1, None, 0.0, why),
        )
    ]
    report.write(over, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page.count(f'<div class="alarm"><b>Training step 1:</b> {why}') == 1
    assert (
        f"<b>To change:</b> begin with the alarm: {why}." in page
        and page.count(why) == 2
    )


def test_three_sentences_say_what_was_saved_where_it_was_lost_and_what_to_change(
    run: list[LoggedRollout], tmp_path: Path
) -> None:
    saved, lost, change = (text for _, text in report.sentences(run))
    assert (
        saved
        == "about 20.0 s of 180.0 s of decoding (11%); a request got 2.00 tokens from a"
        " forward pass."
    )
    assert (
        lost
        == "0% of the decoding time passed in steps without drafts, 50% of the draft"
        " tokens were rejected, 50% of the requests began without history of their"
        " problem."
    )
    assert change == "nothing: drafts saved more than the rejected ones cost."
    report.write(run, tmp_path)
    page = (tmp_path / "report.html").read_text()
    leads = re.findall(r'<p class="lead"><b>([\w ]+):</b> (.*?)</p>', page)
    assert leads == [("Saved", saved), ("Lost", lost), ("To change", change)]


def changed(run: list[LoggedRollout], **counts: Any) -> str:
    """What is advised where every engine counts this as well."""
    over = [
        LoggedRollout(
            r.source, r.steps, r.requests, [{**c, **counts} for c in r.counts], r.end
        )
        for r in run
    ]
    return report.sentences(over)[2][1]


def test_the_advice_is_for_what_the_log_shows(run: list[LoggedRollout]) -> None:
    assert changed(run, neural_counts=(100, 20)).startswith(
        "das.draft.weights: trainer; 20% of"
    )
    assert changed(run, alarm="the drafter's weights were not synced").startswith(
        "begin with the alarm"
    )
    assert changed(run[:4]).startswith(
        "nothing yet: 100% of the requests were the first of their problem"
    )
    costly = [
        LoggedRollout(
            r.source, r.steps, r.requests, r.counts, r.end._replace(saved=-1.0)
        )
        for r in run
        if r.end
    ]
    assert report.sentences(costly)[0][1].startswith(
        "nothing; drafts cost 8.0 s beside 152.0 s of decoding"
    )
    assert "`drafter: none`" in changed(costly)
    plain = [s._replace(drafted=0, accepted=0, requests=30) for s in run[0].steps]
    resting = [LoggedRollout(r.source, plain, r.requests, r.counts, r.end) for r in run]
    assert "fewer requests an engine: 30 ran in steps without drafts" in changed(
        resting
    )
    begun = report.sentences([LoggedRollout("a", run[0].steps)])
    assert begun[2][1].startswith("nothing yet")
    begun = report.sentences([LoggedRollout("a", run[0].steps, run[0].requests)])
    assert begun[0][1].startswith("not known before the first weight sync")


def validated(run: list[LoggedRollout]) -> list[LoggedRollout]:
    """The run with a validation in each rollout, which drafts twice as well."""
    found = []
    for rollout in run:
        steps = [
            step._replace(validating=4, accepted=2 * step.accepted)
            for step in rollout.steps
        ]
        requests = [request._replace(record=False) for request in rollout.requests]
        assert rollout.end is not None
        found.append(
            replace(
                rollout,
                steps=[*steps, *rollout.steps],
                requests=[*requests, *rollout.requests],
                end=rollout.end._replace(saved=3 * rollout.end.saved),
            )
        )
    return found


def test_the_figures_are_those_of_training_and_validations_stand_apart(
    run: list[LoggedRollout], tmp_path: Path
) -> None:
    both = validated(run)
    training = run_series.without_validation(both)
    assert run_series.by_training_step(training) == run_series.by_training_step(run)
    said = dict(report.sentences(both))
    validation = said.pop("Validation")
    assert said == dict(report.sentences(run))
    assert validation == (
        "32 requests in 160.0 s of decoding, 3.00 tokens from a forward pass; in none of"
        " the other figures."
    )
    report.write(both, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "requests: 32" in page and "Validation:</b> 32 requests" in page
    alone = [replace(each, steps=each.steps[:40]) for each in both]
    with pytest.raises(DasError, match="no decode step of a training rollout"):
        report.write(alone, tmp_path)


def test_the_page_says_which_run_it_is_of(
    run: list[LoggedRollout], tmp_path: Path
) -> None:
    ran = RunRecord("Qwen/Qwen2.5-7B", "history", "0.31.0", "0.2.0")
    log = DecisionLog(str(tmp_path / "grpo-7b"), ran)
    for record in (*run[0].steps, run[0].end):
        log.add(record)
    done = CliRunner().invoke(main, ["report", str(tmp_path / "grpo-7b")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "grpo-7b" / "report" / "report.html").read_text()
    assert page.count("Rollouts of grpo-7b") == 2
    assert (
        "Qwen/Qwen2.5-7B, drafter history, das-adapter 0.2.0, vLLM 0.31.0; from"
        " 1970-01-01 00:01 to 1970-01-01 00:02 UTC." in page
    )
    assert "<!--RUN-->" not in page and "weight version" not in page


def test_each_file_of_a_log_says_what_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_log, "MAX_FILE_BYTES", 100)
    ran = RunRecord("a policy", "history", "0.31.0", "0.2.0")
    log = DecisionLog(str(tmp_path), ran)
    for version in range(1, 5):
        log.add(StepRecord(100.0, 4, 12, 8, 2, 0.5, 0.4))
        log.add(WeightSyncRecord(version, None, saved=0.0, stopped=None))
    assert {rollout.run for rollout in read(tmp_path)} == {ran}


def test_one_source_of_drafts_has_no_panel_of_its_own(
    run: list[LoggedRollout], tmp_path: Path
) -> None:
    alone = [
        replace(each, counts=[{**c, "neural_counts": (0, 0)} for c in each.counts])
        for each in run
    ]
    for rollouts, drawn in ((run, True), (alone, False)):
        report.write(rollouts, tmp_path)
        data = (tmp_path / "report.html").read_text().partition('id="data">')[2]
        assert ('["by source"' in data) == drawn


def test_running_requests_are_those_between_begin_and_end(
    run: list[LoggedRollout],
) -> None:
    over = run_series.timeline([r for r in run if r.version == 1])
    running = [
        int(over["running"][np.searchsorted(over["at"], t, side="right") - 1])
        for t in (5, 15, 25, 35, 45)
    ]
    assert running == [8, 6, 4, 2, 0]
    assert over["rejected"].sum() > 0
    assert np.allclose(over["accepted"][over["accepted"] > 0], 2)


def test_a_run_of_which_no_request_has_ended_has_a_page(
    run: list[LoggedRollout], tmp_path: Path
) -> None:
    report.write([LoggedRollout("a", run[0].steps)], tmp_path)
    assert '"timeline"' not in (tmp_path / "report.html").read_text()


def test_the_page_needs_nothing_from_elsewhere_and_text_in_it_is_escaped(
    run: list[LoggedRollout], tmp_path: Path
) -> None:
    stopped = (
        run[0].end._replace(stopped="<script>alert(1)</script>") if run[0].end else None
    )
    report.write(
        [
            LoggedRollout(
                run[0].source, run[0].steps, run[0].requests, run[0].counts, stopped
            )
        ],
        tmp_path,
    )
    page = (tmp_path / "report.html").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="http[^"]*"', page)


def drawn_by_browser(
    run: list[LoggedRollout], tmp_path: Path, width: int = 1300
) -> tuple[dict[str, Any], str]:
    """What a browser window of this width has drawn, and the page's elements."""
    report.write(run, tmp_path)
    page = tmp_path / "report.html"
    page.write_text(page.read_text().replace("</body>", READ_BACK + "</body>"))
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},4000",
        "--virtual-time-budget=20000",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=300
    )
    answer = re.search(r'<pre id="read-back">(.*?)</pre>', done.stdout, re.DOTALL)
    assert answer, done.stderr[-2000:]
    drawn: dict[str, Any] = json.loads(html.unescape(answer[1]))
    return drawn, done.stdout


@pytest.mark.skipif(
    BROWSER is None, reason="no Chromium here: apt-get install chromium"
)
@pytest.mark.parametrize("width", [500, 1300])
def test_legends_titles_and_captions_do_not_overlap(
    width: int, run: list[LoggedRollout], tmp_path: Path
) -> None:
    drawn, _ = drawn_by_browser(run, tmp_path, width)
    for name, figure in drawn.items():
        boxes = [box for box in figure["boxes"] if box[2] > box[0]]
        assert len(boxes) >= 2, name
        for first, second in itertools.combinations(boxes, 2):
            apart = (
                first[2] <= second[0] + 1
                or second[2] <= first[0] + 1
                or first[3] <= second[1] + 1
                or second[3] <= first[1] + 1
            )
            assert apart, (name, first, second)


@pytest.mark.skipif(
    BROWSER is None, reason="no Chromium here: apt-get install chromium"
)
def test_a_browser_draws_the_figures_of_the_run(
    run: list[LoggedRollout], tmp_path: Path
) -> None:
    drawn, page = drawn_by_browser(run, tmp_path)

    def trace(figure: str, name: str) -> dict[str, Any]:
        return next(t for t in drawn[figure]["traces"] if t["name"] == name and t["x"])

    assert all(figure["marks"] for figure in drawn.values()), (
        "every figure has drawn something"
    )
    assert trace("acceptance", "by epoch")["y"] == [25, 75]
    assert trace("acceptance", "by training step")["x"] == [1, 2, 3, 4]
    assert trace("acceptance", "by source")["x"] == ["history", "neural drafter"]
    assert list(drawn) == [
        "saved",
        "acceptance",
        "history",
        "timeline",
    ], "as the sentences have it"
    assert trace("saved", "saved")["y"] == [5, 5, 5, 5]
    assert trace("saved", "spent with drafts")["y"] == [40, 40, 40, 40]
    assert trace("saved", "spent without drafts")["y"] == [0, 0, 0, 0]
    assert trace("history", "history hits")["y"] == [0, 0, 100, 100]
    assert max(trace("timeline", "running requests")["y"]) == 8
    assert (
        len(
            [
                y
                for t in drawn["timeline"]["traces"]
                if t["name"] == "predicted short"
                for y in t["y"]
            ]
        )
        == 2 * 4
    )
    assert drawn["timeline"]["buttons"] == [
        "whole rollout",
        "tail: after 80 % have ended",
    ]
    for figure, axis in (
        ("timeline", "seconds since the rollout began"),
        ("saved", "seconds, all engines"),
        ("acceptance", "accepted, %"),
    ):
        assert axis in drawn[figure]["axes"]
    assert (
        "Training step 3:</b> speculation cost 1.00 s in 2.00 s of drafted steps"
        in page
    )
