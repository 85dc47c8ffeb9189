"""Chained arithmetic modulo 100: problem generator, solution writer, checker and
reward.

A problem is one line of text, ``"17 a+5 b*3 c-4"``: a two-digit start value and up to
52 labelled operations (``+``, ``-`` or ``*`` with a digit).  The answer writes one line
per operation, with the value before and after it, and ends with the result::

    a+5:17>22
    b*3:22>66
    c-4:66>62
    #### 62

A line may state its step twice (``a+5:17>22?17>22``, a "double-check"); the last
statement counts.  A ``~`` instead of ``>`` marks a guess; the checker looks at the
values only. This file uses only the standard library, so it can be loaded by path as a
reward function.
"""

import random
import re
import string
from typing import Any

LABELS = string.ascii_letters
MAX_STEPS = len(LABELS)
MODULUS = 100

SHORT_STEPS = (3, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 10)
LONG_STEPS = ((11, 14), (15, 20), (21, 34), (40, MAX_STEPS))
STRATA = (*((steps, steps) for steps in SHORT_STEPS), *LONG_STEPS)
"""The fewest and the most steps of each of 16 problems, of which four are long."""

_ANSWER = re.compile(r"#### (\d\d)\s*$")


def make_problem(rng: random.Random, steps: int) -> str:
    """Return the text of a random problem with ``steps`` operations."""
    parts = [f"{rng.randrange(MODULUS):02d}"]
    for label in LABELS[:steps]:
        operator = rng.choice("+-*")
        operand = rng.randint(2, 9)
        parts.append(f"{label}{operator}{operand}")
    return " ".join(parts)


def apply(value: int, op: str) -> int:
    """Apply one operation such as ``"*3"`` to ``value``, modulo 100."""
    operand = int(op[1:])
    result = {"+": value + operand, "-": value - operand, "*": value * operand}[op[0]]
    return result % MODULUS


def parse(problem: str) -> tuple[int, list[str]]:
    """Split a problem's text into its start value and its operations, without their
    labels.
    """
    start, *ops = problem.split()
    return int(start), [op[1:] for op in ops]


def answer(problem: str) -> str:
    """Return the right answer of a problem as two digits."""
    value, ops = parse(problem)
    for op in ops:
        value = apply(value, op)
    return f"{value:02d}"


def write_solution(
    problem: str,
    rng: random.Random | None = None,
    slip: float = 0.0,
    guess: float = 0.0,
    check: float = 0.0,
) -> str:
    """Write the working of a problem; with the probabilities above 0, as a fallible
    writer would.

    With probability ``guess`` a result is guessed, which writes ``~``, and otherwise it
    is wrong with probability ``slip``.  A wrong or guessed result is 10 too low or too
    high (a lost or an extra carry), and the working goes on from it.  Each line is
    stated a second time with probability ``check``.
    """
    rng = rng or random.Random(0)
    value, ops = parse(problem)
    lines = []
    for label, op in zip(LABELS, ops, strict=False):
        statements = []
        num_statements = 2 if rng.random() < check else 1
        for _ in range(num_statements):
            guessed = bool(guess) and rng.random() < guess
            mistake = 0
            if guessed or rng.random() < slip:
                mistake = rng.choice((-10, 10))
            result = (apply(value, op) + mistake) % MODULUS
            sign = "~" if guessed else ">"
            statements.append(f"{value:02d}{sign}{result:02d}")
        lines.append(f"{label}{op}:{'?'.join(statements)}")
        value = result
    return "\n".join([*lines, f"#### {value:02d}"])


def is_correct(solution: str, ground_truth: str) -> bool:
    """Tell whether a response ends with ``#### NN`` where ``NN`` is the right
    answer.
    """
    match = _ANSWER.search(solution)
    return match is not None and match[1] == ground_truth


def step_score(solution: str, problem: str) -> float:
    """Return the share of the problem's steps whose line is right, given the value the
    line before it arrived at.
    """
    value, ops = parse(problem)
    num_right = 0
    for line, label, op in zip(solution.split("\n"), LABELS, ops, strict=False):
        result = line[-2:]
        last_statement = re.split("[:?]", line)[-1].replace("~", ">")
        expected = f"{value:02d}>{apply(value, op):02d}"
        if line.startswith(f"{label}{op}:") and last_statement == expected:
            num_right += 1
        if not result.isdecimal():
            break
        value = int(result)
    return num_right / len(ops)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    """Score a response: 0.9 for the right answer and up to 0.1 for right steps (veRL's
    reward function signature).

    The steps are judged where ``extra_info["problem"]`` holds the problem; without it
    they count as the answer does.
    """
    acc = float(is_correct(solution_str, ground_truth))
    problem = (extra_info or {}).get("problem")
    steps = step_score(solution_str, problem) if problem else acc
    return {"score": 0.9 * acc + 0.1 * steps, "acc": acc}
