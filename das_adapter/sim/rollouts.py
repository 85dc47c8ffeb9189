"""Read recorded rollouts: veRL's and NeMo-RL's dumps, and plain ones."""

from __future__ import annotations

import io
import itertools
import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from das_adapter.core.index.values import Int32
from das_adapter.errors import DasError

Tokenize = Callable[[str], "list[int]"]


class RolloutFileError(DasError):
    """A dump that can't be read as rollouts: names the file and what it lacks."""


@dataclass(frozen=True)
class Rollout:
    """One recorded response."""

    problem: int
    """Number of its prompt among those of the file."""
    step: int
    run: int
    """Policy that wrote it, where a file holds several; responses of one problem, step and run are siblings."""
    prompt: Int32
    """Token ids, shape (p,)."""
    tokens: Int32
    """Token ids of the response, shape (n,), n >= 1."""


def steps_of(rollouts: Iterable[Rollout]) -> list[list[Rollout]]:
    """Return the rollouts of each step, in turn; what several runs wrote in one step are steps of their own, since none
    of these policies saw what another wrote."""

    def step(r: Rollout) -> tuple[int, int]:
        return r.step, r.run

    return [list(group) for _, group in itertools.groupby(sorted(rollouts, key=step), key=step)]


def read(path: Path, tokenizer: str | None = None) -> list[Rollout]:
    """Read the rollouts of a file, or of all files of a directory.

    Args:
        path: `.npz` (arrays `ids`, `offsets`, `problem`, `step`, `run`, `prompt_ids`, `prompt_offsets`), `.jsonl` or
            `.jsonl.zst`, or a directory of `.jsonl`. A JSON line is veRL's (`input`, `output`, `step`), NeMo-RL's
            (`token_ids` and `token_loss_mask`, or `content`), or has `problem`, `response` and perhaps `step`, `run`
            or `model`.
        tokenizer: name or folder of a Hugging Face tokenizer; needed where a dump holds text and no token ids.

    Raises:
        RolloutFileError: there is no such file, it is none of these, or it holds text and there is no tokenizer.
    """
    try:
        return _read(path, tokenizer)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise RolloutFileError(f"{path}: {error}") from None


def _read(path: Path, tokenizer: str | None) -> list[Rollout]:
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.name.endswith((".jsonl", ".jsonl.zst")))
    else:
        files = [path]
    if path.suffix == ".npz":
        rollouts = _from_arrays(path)
    else:
        # numbers in the order in which they are first asked for
        problems, runs = (defaultdict[str, int](itertools.count().__next__) for _ in range(2))
        tokenize = _tokenizer(tokenizer, path)
        rollouts = [r for file in files for r in _from_lines(file, problems, runs, tokenize)]
    if not rollouts:
        raise RolloutFileError(f"{path}: found no rollout with a response")
    return rollouts


def _from_arrays(path: Path) -> list[Rollout]:
    with np.load(path) as archive:
        lacking = sorted({"ids", "offsets", "problem"} - set(archive.files))
        if lacking:
            raise RolloutFileError(f"{path}: lacks the arrays {', '.join(lacking)}")
        arrays = {name: archive[name] for name in archive.files}
    ids, offsets, problem = arrays["ids"].astype(np.int32), arrays["offsets"], arrays["problem"]
    zero = np.zeros(len(problem), dtype=np.int32)
    step, run = arrays.get("step", zero), arrays.get("run", zero)
    if "prompt_ids" in arrays:
        prompts = np.split(arrays["prompt_ids"].astype(np.int32), arrays["prompt_offsets"][1:-1])
    else:
        prompts = [np.zeros(0, dtype=np.int32)] * (int(problem.max(initial=-1)) + 1)
    return [
        Rollout(int(problem[i]), int(step[i]), int(run[i]), prompts[problem[i]], ids[offsets[i] : offsets[i + 1]])
        for i in range(len(problem))
        if offsets[i] < offsets[i + 1]
    ]


def _from_lines(path: Path, problems: dict[str, int], runs: dict[str, int], tokenize: Tokenize) -> Iterator[Rollout]:
    in_name = re.search(r"step_?(\d+)|^(\d+)\.", path.name)
    default = int(next(filter(None, in_name.groups()))) if in_name else 0
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, response = _texts(row, tokenize)
        except (json.JSONDecodeError, KeyError, TypeError, IndexError) as error:
            raise RolloutFileError(
                f"{path}:{number}: no rollout ({error!r}); allowed: veRL's input/output, NeMo-RL's "
                "token_ids/token_loss_mask or content, or problem/response"
            ) from None
        if len(response):
            run = runs[str(row.get("run", row.get("model", "")))]
            key = str(row.get("problem_id", prompt.tobytes()))
            yield Rollout(problems[key], int(row.get("step", default)), run, prompt, response)


def _texts(row: dict[str, Any], tokenize: Tokenize) -> tuple[Int32, Int32]:
    def ids(text: str) -> Int32:
        return np.array(tokenize(text), dtype=np.int32)

    if "token_ids" in row:  # NeMo-RL: one padded sequence, and a mask of what the policy wrote
        tokens = np.array(row["token_ids"], dtype=np.int32).reshape(-1)
        written = np.array(row["token_loss_mask"]).reshape(-1).astype(bool)[: len(tokens)]
        length = int(np.array(row.get("input_lengths", len(tokens))).reshape(-1)[0])
        first = int(np.argmax(written)) if written.any() else length
        return tokens[:first], tokens[:length][written[:length]]
    if "content" in row:  # NeMo-RL's older dumps: the messages
        messages = row["content"][0] if isinstance(row["content"][0], list) else row["content"]
        return ids("".join(messages[:-1])), ids(messages[-1])
    if "output" in row:
        return ids(row["input"]), ids(row["output"])
    return ids(row["problem"]), ids(row["response"])


def _lines(path: Path) -> Iterable[str]:
    if path.suffix != ".zst":
        return path.read_text(encoding="utf-8").splitlines()
    try:
        import zstandard
    except ImportError:
        raise RolloutFileError(f"{path}: reading .zst needs the package zstandard") from None
    with path.open("rb") as file:
        stream = zstandard.ZstdDecompressor(max_window_size=2**31).stream_reader(file)
        return io.TextIOWrapper(stream, encoding="utf-8").read().splitlines()


def _tokenizer(name: str | None, path: Path) -> Tokenize:
    if name is None:

        def refuse(_: str) -> list[int]:
            raise RolloutFileError(f"{path}: holds text and no token ids; name the policy's tokenizer (--tokenizer)")

        return refuse
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    return lambda text: tokenizer.encode(text, add_special_tokens=False)
