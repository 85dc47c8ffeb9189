"""The reward of tiny_math as OpenRLHF wants it: `reward.remote_url`, a Python file with
`reward_func`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tiny_math"))
import task


def reward_func(
    queries: list[str], prompts: list[str], labels: list[str]
) -> dict[str, Any]:
    """Score one response; its label is the problem."""
    (query,) = queries
    (prompt,) = prompts
    (problem,) = labels
    text = query.removeprefix(prompt).removesuffix("<|end|>")
    right = task.answer(problem)
    score = task.compute_score("", text, right, {"problem": problem})
    return {"rewards": score["score"]}
