"""Read recorded rollouts: veRL's and NeMo-RL's dumps, and plain ones."""

from __future__ import annotations

import itertools
import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from das_adapter.core.index.values import Int32, Tokens
from das_adapter.errors import DasError

Tokenize = Callable[[str], "list[int]"]


@dataclass(frozen=True)
class Rollout:
    """One recorded response."""

    problem: int
    """Number of its prompt among those of the file."""
    step: int
    run: int
    """Policy that wrote it, where a file holds several; responses of one problem, step
    and run are siblings.
    """
    prompt: Int32
    """Token ids, shape (p,)."""
    tokens: Int32
    """Token ids of the response, shape (n,), n >= 1."""
    ahead: Tokens = ()
    """What would have been written ahead of it, token ids."""


def steps_of(rollouts: Iterable[Rollout]) -> list[list[Rollout]]:
    """Return the rollouts of each step, in turn; what several runs wrote in one step
    are steps of their own, since none of these policies saw what another wrote.
    """

    def step(r: Rollout) -> tuple[int, int]:
        return r.step, r.run

    return [
        list(group)
        for _, group in itertools.groupby(sorted(rollouts, key=step), key=step)
    ]


def written_ahead(rollouts: Sequence[Rollout], agreement: float) -> list[Rollout]:
    """Return rollouts with what was written ahead of them: their own tokens up to the
    first that is not the same, as each is with this chance, and then those of a
    response of their problem in another step, if there is one.
    """
    rng = np.random.default_rng(0)
    found = list[Rollout]()
    steps: defaultdict[int, dict[tuple[int, int], list[Int32]]] = defaultdict(dict)
    for r in rollouts:
        steps[r.problem].setdefault((r.step, r.run), []).append(r.tokens)
    for r, same in zip(
        rollouts, rng.geometric(1.0 - agreement, len(rollouts)) - 1, strict=True
    ):
        others = [
            text
            for step, texts in steps[r.problem].items()
            if step != (r.step, r.run)
            for text in texts
        ]
        rest = others[rng.integers(len(others))][same:] if others else r.tokens[:0]
        found.append(replace(r, ahead=np.concatenate([r.tokens[:same], rest])))
    return found


def read(path: Path, tokenizer: str | None = None) -> list[Rollout]:
    """Read the rollouts of a file, or of all files of a directory.

    Args:
        path: `.npz` (arrays `ids`, `offsets`, `problem`, `step`, `run`, `prompt_ids`,
            `prompt_offsets`), `.jsonl`, or a directory of `.jsonl`, of which NeMo-RL's
            validations are left out. A JSON line is veRL's (`input`, `output`, `step`),
            NeMo-RL's (`token_ids` and `token_loss_mask`), or has `problem`, `response`
            and perhaps `step`, `run` or `model`.
        tokenizer: name or folder of a Hugging Face tokenizer; needed where a dump holds
            text and no token ids.

    Raises:
        DasError: there is no such file, it is none of these, or it holds text and there
            is no tokenizer.
    """
    try:
        if path.suffix == ".npz":
            rollouts = _from_arrays(path)
        else:
            inside = (
                file
                for file in sorted(path.glob("*.jsonl"))
                if not file.name.startswith("val_data_step")
            )
            files = list(inside) if path.is_dir() else [path]
            # numbers in the order in which they are first asked for
            problems, runs = (
                defaultdict[str, int](itertools.count().__next__) for _ in range(2)
            )
            tokenize = _tokenizer(tokenizer) if tokenizer else None
            rollouts = [
                r for file in files for r in _from_lines(file, problems, runs, tokenize)
            ]
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DasError(f"{path}: {error}") from None
    if not rollouts:
        raise DasError(f"{path}: found no rollout with a response")
    return rollouts


def _from_arrays(path: Path) -> list[Rollout]:
    with np.load(path) as archive:
        lacking = sorted({"ids", "offsets", "problem"} - set(archive.files))
        if lacking:
            raise DasError(f"{path}: lacks the arrays {', '.join(lacking)}")
        arrays = {name: archive[name] for name in archive.files}
    ids = arrays["ids"].astype(np.int32)
    offsets = arrays["offsets"]
    problem = arrays["problem"]
    zero = np.zeros(len(problem), dtype=np.int32)
    step = arrays.get("step", zero)
    run = arrays.get("run", zero)
    if "prompt_ids" in arrays:
        prompts = np.split(
            arrays["prompt_ids"].astype(np.int32), arrays["prompt_offsets"][1:-1]
        )
    else:
        prompts = [np.zeros(0, dtype=np.int32)] * (int(problem.max(initial=-1)) + 1)
    return [
        Rollout(
            int(problem[i]),
            int(step[i]),
            int(run[i]),
            prompts[problem[i]],
            ids[offsets[i] : offsets[i + 1]],
        )
        for i in range(len(problem))
        if offsets[i] < offsets[i + 1]
    ]


def _from_lines(
    path: Path,
    problems: dict[str, int],
    runs: dict[str, int],
    tokenize: Tokenize | None,
) -> Iterator[Rollout]:
    in_name = re.search(r"step_?(\d+)|^(\d+)\.", path.name)
    default = int(next(filter(None, in_name.groups()))) if in_name else 0
    for number, line in enumerate(
        path.read_text(encoding="utf-8").split("\n"), start=1
    ):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, response = _texts(row, tokenize)
            step = int(row.get("step", default))
        except (json.JSONDecodeError, KeyError, TypeError, IndexError) as error:
            raise DasError(
                f"{path}:{number}: no rollout ({error!r}); allowed: veRL's"
                " input/output, NeMo-RL's token_ids/token_loss_mask, or"
                " problem/response"
            ) from None
        if len(response):
            run = runs[str(row.get("run", row.get("model", "")))]
            key = str(row.get("problem_id", prompt.tobytes()))
            yield Rollout(problems[key], step, run, prompt, response)


def _texts(row: dict[str, Any], tokenize: Tokenize | None) -> tuple[Int32, Int32]:
    def ids(text: str) -> Int32:
        if tokenize is None:
            raise ValueError(
                "holds text and no token ids; name the policy's tokenizer (--tokenizer)"
            )
        return np.array(tokenize(text), dtype=np.int32)

    # NeMo-RL: one padded sequence, and a mask of what the policy wrote
    if "token_ids" in row:
        tokens = np.array(row["token_ids"], dtype=np.int32).reshape(-1)
        written = (
            np.array(row["token_loss_mask"]).reshape(-1).astype(bool)[: len(tokens)]
        )
        length = int(np.array(row.get("input_lengths", len(tokens))).reshape(-1)[0])
        first = int(np.argmax(written)) if written.any() else length
        return tokens[:first], tokens[:length][written[:length]]
    if "output" in row:
        return ids(row["input"]), ids(row["output"])
    return ids(row["problem"]), ids(row["response"])


def _tokenizer(name: str) -> Tokenize:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    return lambda text: tokenizer.encode(text, add_special_tokens=False)
