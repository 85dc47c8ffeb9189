"""The tiny arithmetic task, its data files and the policy shipped with it."""

import hashlib
import random
import statistics
import sys
from pathlib import Path

import pandas as pd
import prepare_data
import pytest
import task

POLICY = Path(__file__).parents[2] / "examples" / "tiny_math" / "policy"


def score(problem: str, response: str) -> dict[str, float]:
    return task.compute_score(
        "tiny_math", response, task.answer(problem), {"problem": problem}
    )


# The task


def test_the_answer_chains_the_operations_modulo_100():
    assert task.answer("17 a+5 b*3 c-4") == "62"
    assert task.answer("03 a-5") == "98"
    assert task.answer("99 a*9 b+9") == "00"


def test_working_without_slips_is_the_documented_text():
    assert (
        task.write_solution("17 a+5 b*3 c-4")
        == "a+5:17>22\nb*3:22>66\nc-4:66>62\n#### 62"
    )


@pytest.mark.parametrize("steps", [1, 2, 7, 20, task.MAX_STEPS])
def test_right_working_of_any_length_scores_one(steps: int):
    rng = random.Random(steps)
    for _ in range(20):
        problem = task.make_problem(rng, steps)
        assert score(problem, task.write_solution(problem, rng, check=0.3)) == {
            "score": 1.0,
            "acc": 1.0,
        }


def test_a_guess_that_is_right_counts_as_a_right_step():
    assert score("17 a+5 b*3", "a+5:17~22\nb*3:22~66\n#### 66") == {
        "score": 1.0,
        "acc": 1.0,
    }


def test_the_last_statement_of_a_double_checked_line_counts():
    problem = "17 a+5 b*3"
    assert score(problem, "a+5:17>32?17>22\nb*3:22>66\n#### 66")["score"] == 1.0
    assert score(problem, "a+5:17>22?17>32\nb*3:32>96\n#### 96") == {
        "score": pytest.approx(0.05),
        "acc": 0.0,
    }


def test_right_steps_earn_a_tenth_and_the_answer_the_rest():
    problem = "17 a+5 b*3"
    assert score(problem, "a+5:17>22\nb*3:22>76\n#### 76")["score"] == pytest.approx(
        0.05
    )
    assert score(problem, "a+5:17>22\nb*3:22>66\n#### 67")["score"] == pytest.approx(
        0.1
    )
    assert score(problem, "#### 66")["score"] == pytest.approx(0.9)


@pytest.mark.parametrize(
    "response",
    ["", "66", "#### 6", "#### 166", "#### 66 or so", "a+5:17>", "\n\n", "a\nb\n####"],
)
def test_a_response_without_a_final_answer_line_scores_no_accuracy(response: str):
    assert score("17 a+5 b*3", response)["acc"] == 0.0


def test_the_reward_needs_no_problem_text():
    assert task.compute_score("tiny_math", "#### 66", "66") == {
        "score": 1.0,
        "acc": 1.0,
    }
    assert task.compute_score(
        data_source="x",
        solution_str="#### 67",
        ground_truth="66",
        extra_info=None,
        other=1,
    ) == {
        "score": 0.0,
        "acc": 0.0,
    }


# The data


def test_every_full_chunk_of_16_covers_each_stratum_once():
    rows = prepare_data.make_rows("train", 48, seed=3)
    for i in range(0, 48, 16):
        steps = sorted(row["extra_info"]["difficulty"] for row in rows[i : i + 16])
        assert all(
            low <= n <= high
            for n, (low, high) in zip(steps, sorted(task.STRATA), strict=True)
        )


def test_rows_are_distinct_reproducible_and_depend_on_split_and_seed():
    def problems(*args: object) -> list[str]:
        return [row["extra_info"]["problem"] for row in prepare_data.make_rows(*args)]

    train = problems("train", 48, 0)
    assert len(set(train)) == 48
    assert train == problems("train", 48, 0)
    assert not set(train) & set(problems("test", 48, 0))
    assert train != problems("train", 48, 1)
    assert not set(train) & set(problems("train", 48, 0, frozenset(train)))


def test_lengths_of_right_solutions_are_heavy_tailed():
    rows = prepare_data.make_rows("train", 48, seed=0)
    lengths = sorted(
        len(task.write_solution(row["extra_info"]["problem"])) for row in rows
    )
    assert 50 <= statistics.median(lengths) <= 100
    assert statistics.quantiles(lengths, n=20)[-1] >= 3 * statistics.median(lengths)
    assert 500 <= lengths[-1] <= 768


def test_the_script_writes_the_columns_that_verl_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", "--out", str(tmp_path)])
    prepare_data.main()
    frames = {
        split: pd.read_parquet(tmp_path / f"{split}.parquet")
        for split in ("train", "test")
    }
    assert {split: len(frame) for split, frame in frames.items()} == {
        "train": 48,
        "test": 32,
    }
    for split, frame in frames.items():
        for i, row in enumerate(frame.to_dict("records")):
            problem = row["extra_info"]["problem"]
            assert list(row["prompt"]) == [{"role": "user", "content": problem}]
            assert (
                row["data_source"] == "tiny_math"
                and row["extra_info"]["split"] == split
            )
            assert row["extra_info"]["index"] == i
            solution = task.write_solution(problem)
            reward = task.compute_score(
                row["data_source"],
                solution,
                row["reward_model"]["ground_truth"],
                row["extra_info"],
            )
            assert reward["score"] == 1.0


# The shipped policy


def test_the_policy_is_frozen():
    """What many tests expect of its text depends on every bit; a new policy needs a new
    digest, and a look at them.
    """
    digest = hashlib.sha256()
    for path in sorted(POLICY.iterdir()):
        digest.update(path.read_bytes())
    assert (
        digest.hexdigest()
        == "9090146f145305c0b7edf9455724d55d3c55605b7152a559fdf0dccb3d869ccd"
    )
