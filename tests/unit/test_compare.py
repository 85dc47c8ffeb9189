"""`das-adapter compare`, with files in the form of the hosts' loggers, TensorBoard's
own, and exported tables.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arms
import pytest
from click.testing import CliRunner

from das_adapter.cli import main

HASHES = [281474976710655, 123456789012345, 5, 98765432109876]
"""One needs all of 48 bits."""
Figures = list[dict[str, float]]


def verl_steps(
    seconds: float = 4.0, accepted: float = 1.0, hashes: list[int] = HASHES
) -> Figures:
    """Four steps as veRL's trainer logs them."""
    return [
        {
            "das/token_hash": float(number),
            "critic/score/mean": 0.25 * i,
            "das/rollout_s": seconds / (i + 1),
            "timing_s/gen": seconds,
            "das/acceptance_length": accepted,
        }
        for i, number in enumerate(hashes)
    ]


def nemo_rl_steps() -> Figures:
    """The same steps under NeMo-RL's names."""
    return [
        {
            "train/das/token_hash": step["das/token_hash"],
            "train/reward": step["critic/score/mean"],
            "timing/train/generation": step["timing_s/gen"],
        }
        for step in verl_steps()
    ]


def verl_file(path: Path, steps: Figures) -> Path:
    """As veRL's file logger writes them (tests/contract/test_tracking.py reads what
    that has written).
    """
    rows: list[dict[str, Any]] = [
        {"step": 0, "data": {"val-core/gsm8k/reward/mean@1": 0.5}}
    ]
    rows += [{"step": number, "data": step} for number, step in enumerate(steps, 1)]
    path.with_suffix(".jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path.with_suffix(".jsonl")


def lines(path: Path, steps: Figures) -> Path:
    """NeMo-RL's figures, a line for each prefix, as examples/nemo_rl writes them."""
    rows = []
    for number, step in enumerate(steps, 1):
        for name, value in step.items():
            prefix, _, rest = name.partition("/")
            if prefix == "timing":
                prefix = "timing/train"
                rest = rest.removeprefix("train/")
            rows.append({"step": number, "prefix": prefix, "data": {rest: value}})
    path.with_suffix(".jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path.with_suffix(".jsonl")


def events(path: Path, steps: Figures) -> Path:
    """A directory of TensorBoard's, with the hyperparameters in one below, as NeMo-RL
    has them.
    """
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(log_dir=path)
    writer.add_hparams({"lr": 1e-5}, {})
    for number, step in enumerate(steps, 1):
        for name, value in step.items():
            writer.add_scalar(name, value, number)
    writer.close()
    return path


def wandb_csv(path: Path, steps: Figures) -> Path:
    """A chart's table: the run before each name, least and greatest value beside it,
    empty cells.
    """
    names = list(steps[0])
    columns = [
        f"my run - {name}{end}" for name in names for end in ("", "__MIN", "__MAX")
    ]
    with path.with_suffix(".csv").open("w") as file:
        table = csv.writer(file)
        table.writerow(["Step", *columns])
        table.writerow([0, *("" for _ in columns)])
        for number, step in enumerate(steps, 1):
            table.writerow(
                [number, *(value for name in names for value in (step[name], 0, 1e9))]
            )
    return path.with_suffix(".csv")


def wandb_history(path: Path, steps: Figures) -> Path:
    """What `run.history()` of their API returns, as JSON."""
    rows = [
        {"_step": number, "_runtime": 1.5, "note": "text", **step}
        for number, step in enumerate(steps, 1)
    ]
    path.with_suffix(".json").write_text(json.dumps(rows))
    return path.with_suffix(".json")


def compared(a: Path, b: Path, *options: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(main, ["compare", str(a), str(b), "--json", *options])
    return done.exit_code, json.loads(done.stdout)


WRITERS = [verl_file, events, wandb_csv, wandb_history]


@pytest.mark.parametrize("write_b", WRITERS)
@pytest.mark.parametrize("write_a", WRITERS)
def test_any_two_logs_of_equal_runs_are_equal(
    write_a: Callable[..., Path], write_b: Callable[..., Path], tmp_path: Path
) -> None:
    a = write_a(tmp_path / "a", verl_steps())
    b = write_b(tmp_path / "b", verl_steps(seconds=2.0, accepted=2.5))
    code, found = compared(a, b)
    assert code == 0
    assert (found["steps"], found["tokens"], found["rewards"]) == (4, [4, 4], [4, 4])
    assert found["rollout_s"] == pytest.approx([25 / 3, 25 / 6]) and found[
        "speed_up"
    ] == pytest.approx(2.0)
    assert (
        found["accepted"] == [1.0, 2.5]
        and found["names"]["rollout_s"] == ["das/rollout_s"] * 2
    )
    assert [row["reward"] for row in found["rows"]] == [
        [0.25 * i] * 2 for i in range(4)
    ]


@pytest.mark.parametrize("write", [lines, events])
def test_nemo_rls_names_are_known(write: Callable[..., Path], tmp_path: Path) -> None:
    code, found = compared(
        write(tmp_path / "a", nemo_rl_steps()), write(tmp_path / "b", nemo_rl_steps())
    )
    assert (code, found["tokens"], found["rewards"], found["speed_up"]) == (
        0,
        [4, 4],
        [4, 4],
        1.0,
    )
    assert found["names"]["rollout_s"][0] == "timing/train/generation" and found[
        "accepted"
    ] == [None, None]


@pytest.mark.parametrize("write", WRITERS)
def test_tokens_that_differ_in_one_step_make_the_exit_code_1(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    others = [HASHES[0], HASHES[1] + 2**26, *HASHES[2:]]
    a = write(tmp_path / "a", verl_steps())
    b = write(tmp_path / "b", verl_steps(hashes=others))
    code, found = compared(a, b)
    assert (code, found["tokens"]) == (1, [3, 4])
    done = CliRunner().invoke(
        main, ["compare", str(a), str(b), "--every", "2"], terminal_width=100
    )
    assert done.exit_code == 1
    assert [
        line.split()[:4] for line in done.output.splitlines() if line[:1].isdigit()
    ] == [
        ["1-2", "1", "of", "2"],
        ["3-4", "same", "0.625", "0.625"],
    ]
    assert "Tokens: the same in 3 of 4 steps." in done.output


def test_the_example_of_nemo_rl_compares_its_arms(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for arm in arms.ARMS:
        lines(tmp_path / arm, nemo_rl_steps())
    assert [step["reward"] for step in arms.steps(tmp_path / "off.jsonl")] == [
        0.0,
        0.25,
        0.5,
        0.75,
    ]
    arms.show(tmp_path, epoch=2)
    printed = capfd.readouterr().out
    assert "Tokens: the same in 4 of 4 steps." in printed
    assert [line[:3] for line in printed.splitlines()][2:4] == ["1-2", "3-4"]


def test_one_bit_counts_where_logs_are_exact(tmp_path: Path) -> None:
    others = verl_steps(hashes=[HASHES[0] - 1, *HASHES[1:]])
    assert (
        compared(
            verl_file(tmp_path / "a", verl_steps()), verl_file(tmp_path / "b", others)
        )[0]
        == 1
    )


def test_without_a_hash_of_both_tokens_are_not_compared_but_times_are(
    tmp_path: Path,
) -> None:
    stock = [
        {name: v for name, v in step.items() if not name.startswith("das/")}
        for step in verl_steps(seconds=6.0)
    ]
    a = verl_file(tmp_path / "a", stock)
    b = verl_file(tmp_path / "b", verl_steps(seconds=3.0))
    code, found = compared(a, b)
    assert (code, found["tokens"], found["names"]["rollout_s"][0]) == (
        3,
        [0, 0],
        "timing_s/gen",
    )
    assert found["speed_up"] == 2.0
    done = CliRunner().invoke(main, ["compare", str(a), str(b)])
    assert "Tokens: not compared; both runs must log das/token_hash" in done.output
    assert "B is 2.00x as fast as A, 50% less time" in done.output


def test_the_last_of_a_step_counts_and_steps_of_one_run_are_left_out(
    tmp_path: Path,
) -> None:
    first = verl_file(tmp_path / "a", verl_steps())
    resumed = verl_steps(hashes=[7, 7])
    again = [
        {"step": number, "data": step}
        for number, step in enumerate(verl_steps()[1:3], 2)
    ]
    b = verl_file(tmp_path / "b", resumed)
    # killed
    b.write_text(
        b.read_text() + "\n".join(map(json.dumps, again)) + '\n{"step": 4, "da'
    )
    code, found = compared(first, b)
    assert (code, found["steps"], found["tokens"], found["only_one"]) == (
        1,
        3,
        [2, 3],
        1,
    )


def test_figures_of_steps_in_which_one_run_has_none_are_not_compared(
    tmp_path: Path,
) -> None:
    without = verl_steps()
    del without[1]["das/token_hash"], without[2]["critic/score/mean"]
    a = verl_file(tmp_path / "a", verl_steps())
    b = verl_file(tmp_path / "b", without)
    code, found = compared(a, b)
    assert (code, found["steps"]) == (0, 4)
    assert found["tokens"] == [3, 3]
    assert found["rewards"] == [3, 3]


def test_only_a_newline_ends_a_line_of_a_log(tmp_path: Path) -> None:
    a = verl_file(tmp_path / "a", verl_steps())
    b = tmp_path / "b.jsonl"
    rows = map(json.loads, a.read_text().splitlines())
    told = "\n".join(
        json.dumps(row | {"run": "1\u20282\u20293\u00854"}, ensure_ascii=False)
        for row in rows
    )
    b.write_text(told + "\n", encoding="utf-8")
    assert compared(a, b)[1]["tokens"] == [4, 4]


def test_a_long_run_has_thirty_rows(tmp_path: Path) -> None:
    a = verl_file(
        tmp_path / "a", [{**verl_steps()[0], "das/rollout_s": 1.0} for _ in range(95)]
    )
    code, found = compared(a, a)
    assert code == 0 and len(found["rows"]) == 24 and found["rows"][-1]["last"] == 95


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    good = verl_file(tmp_path / "good", verl_steps())
    rollouts = tmp_path / "rollouts.jsonl"
    rollouts.write_text('{"input": "1+2=", "output": "3"}\n')
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text('{"step": 1, "data": {}}\n{"step": 2, "da\n{"step": 3}\n')
    later = tmp_path / "later.jsonl"
    later.write_text(json.dumps({"step": 9, "data": verl_steps()[0]}) + "\n")
    other = tmp_path / "other.jsonl"
    other.write_text('{"step": 1, "data": {"loss": 1.0}}\n')
    for path, words in (
        (rollouts, "found responses, which `das-adapter estimate` reads"),
        (damaged, "damaged.jsonl: found no JSON in line 2 ("),
        (tmp_path, "a directory with damaged.jsonl, good.jsonl, "),
        (other, "a run has logged none of critic/rewards/mean, "),
        (later, "no training step in common: found steps 0 to 4 and 9 to 9"),
    ):
        done = CliRunner().invoke(main, ["compare", str(good), str(path)])
        assert done.exit_code == 2 and words in " ".join(done.output.split()), (
            done.output
        )


@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_a_table_of_two_runs_is_refused(suffix: str, tmp_path: Path) -> None:
    path = (tmp_path / "chart").with_suffix(suffix)
    hashes = zip(HASHES, reversed(HASHES), strict=True)
    names = ("off - das/token_hash", "das - 2nd - das/token_hash")
    rows = [
        {"Step": step, **dict(zip(names, pair, strict=True))}
        for step, pair in enumerate(hashes)
    ]
    path.write_text(json.dumps(rows))
    if suffix == ".csv":
        with path.open("w") as file:
            table = csv.DictWriter(file, rows[0])
            table.writeheader()
            table.writerows(rows)
    done = CliRunner().invoke(main, ["compare", str(path), str(path)])
    said = " ".join(done.output.split())
    assert (
        done.exit_code == 2
        and "found 'das/token_hash' of the runs 'off' and 'das - 2nd'" in said
    ), done.output
    assert "export each into a file of its own" in said


def test_a_directory_of_two_runs_is_refused(tmp_path: Path) -> None:
    """Their events would be those of one run, of which the last counts."""
    off, das = (
        events(tmp_path / "project" / name, verl_steps(seconds))
        for name, seconds in (("off", 4), ("das", 2))
    )
    assert compared(off, das)[1]["speed_up"] == pytest.approx(2.0)
    done = CliRunner().invoke(main, ["compare", str(tmp_path / "project"), str(off)])
    said = "".join(done.output.split())
    assert (
        done.exit_code == 2 and f"ofstep1inboth{das}and{off},expectedonerun" in said
    ), done.output


def said_of(path: Path) -> str:
    """What the command says of a file that it refuses, in one line."""
    done = CliRunner().invoke(main, ["compare", str(path), str(path)])
    assert done.exit_code == 2, done.output
    return " ".join(done.output.split())


def test_the_log_of_a_hugging_face_trainer_is_read(tmp_path: Path) -> None:
    history = [{"step": 2 * i, "reward": 0.1 * i, "loss": 1.0} for i in range(1, 5)]
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"global_step": 8, "log_history": history}))
    code, found = compared(path, path)
    assert (code, found["steps"], found["rewards"]) == (3, 4, [4, 4])
    assert [row["first"] for row in found["rows"]] == [2, 4, 6, 8]


def test_runs_are_joined_by_the_trainers_step_not_by_the_calls_of_its_logger(
    tmp_path: Path,
) -> None:
    """Weights & Biases counts `_step` on with an evaluation of one run, too."""
    rows = [
        {"_step": i, "train/global_step": i + 1, "train/reward": 0.1 * i}
        for i in range(6)
    ]
    plain = tmp_path / "plain.jsonl"
    plain.write_text("\n".join(map(json.dumps, rows)))
    evaluation = {"_step": 3, "train/global_step": 3, "eval/reward": 1.0}
    shifted = [row | {"_step": row["_step"] + 1} for row in rows[3:]]
    evaluated = tmp_path / "evaluated.jsonl"
    evaluated.write_text("\n".join(map(json.dumps, [*rows[:3], evaluation, *shifted])))
    found = compared(plain, evaluated)[1]
    assert found["rewards"] == [6, 6]


def test_the_export_of_weights_and_biases_that_is_wanted_is_named(
    tmp_path: Path,
) -> None:
    table = tmp_path / "runs.csv"
    table.write_text('"Name","State","train/loss"\n"run_a","finished","0.2"\n')
    summary = tmp_path / "wandb-summary.json"
    summary.write_text('{"_step": 10, "critic/score/mean": 0.5, "_wandb": {}}')
    for path, words in (
        (table, "found the table of a Weights & Biases project's runs"),
        (summary, "found the summary of a Weights & Biases run"),
    ):
        assert words in said_of(path) and "scan_history()" in said_of(path)


def test_a_table_is_whole_on_a_pipe_of_80_columns(tmp_path: Path) -> None:
    steps = verl_steps(seconds=1234.5678, accepted=12.345)
    for step in steps:
        step["critic/score/mean"] = -0.123456
    a = verl_file(tmp_path / "a", steps)
    others = [HASHES[0], HASHES[1] + 1, *HASHES[2:]]
    b = verl_file(tmp_path / "b", verl_steps(seconds=123.45, hashes=others))
    done = CliRunner().invoke(main, ["compare", str(a), str(b), "--every", "4"])
    lines = done.output.splitlines()
    (row,) = (line for line in lines if line.startswith("1-4"))
    assert "acceptance" in lines[2] and "length A" in lines[3]
    assert "\N{HORIZONTAL ELLIPSIS}" not in done.output and len(row) <= 80
    for cell in ("3 of 4", "-0.123", "2572", "257.2", "10.00", "12.35", "1.000"):
        assert cell in row.split() or cell in row, (cell, row)
    assert "VLLM_BATCH_INVARIANT=1" in done.output
    assert "A 12.35, B 1.00" in done.output
    narrow = CliRunner(env={"COLUMNS": "40"})
    assert (
        row
        in narrow.invoke(
            main, ["compare", str(a), str(b), "--every", "4"]
        ).output.splitlines()
    )
    same = CliRunner().invoke(main, ["compare", str(a), str(a)])
    assert "VLLM_BATCH_INVARIANT" not in same.output
