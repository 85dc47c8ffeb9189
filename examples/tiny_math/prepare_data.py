"""Write train.parquet and test.parquet in veRL's format for the chained-arithmetic
task.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import pandas as pd
from task import STRATA, answer, make_problem


def make_rows(
    split: str, size: int, seed: int, exclude: frozenset[str] = frozenset()
) -> list[dict[str, Any]]:
    """Generate ``size`` distinct problems; each full chunk of 16 covers every stratum
    of difficulty once.
    """
    rng = random.Random(f"{split}-{seed}")
    rows: list[dict[str, Any]] = []
    seen = set(exclude)
    while len(rows) < size:
        for low, high in rng.sample(STRATA, len(STRATA)):
            steps = rng.randint(low, high)
            problem = make_problem(rng, steps)
            while problem in seen:
                problem = make_problem(rng, steps)
            seen.add(problem)
            row = {
                "data_source": "tiny_math",
                "prompt": [{"role": "user", "content": problem}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": answer(problem)},
                "extra_info": {
                    "split": split,
                    "index": len(rows),
                    "difficulty": steps,
                    "problem": problem,
                },
            }
            rows.append(row)
    return rows[:size]


def main() -> None:
    """Parse the command line and write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "data",
        help="directory to write to",
    )
    parser.add_argument("--train-size", type=int, default=48)
    parser.add_argument("--test-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    train = make_rows("train", args.train_size, args.seed)
    train_problems = frozenset(row["extra_info"]["problem"] for row in train)
    test = make_rows("test", args.test_size, args.seed, exclude=train_problems)
    args.out.mkdir(parents=True, exist_ok=True)
    for split, rows in (("train", train), ("test", test)):
        path = args.out / f"{split}.parquet"
        pd.DataFrame(rows).to_parquet(path)
        steps = [row["extra_info"]["difficulty"] for row in rows]
        print(f"{path}: {len(rows)} problems, steps {steps}")


if __name__ == "__main__":
    main()
