"""Read recorded rollouts: veRL's and NeMo-RL's dumps, and plain ones."""

from __future__ import annotations

import itertools
import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from das_adapter.core.index.values import Int32, Tokens
from das_adapter.errors import DasError

Tokenize = Callable[[str], "list[int]"]
VERL_NAMES = ("input", "output")
"""Keys of prompt and response in a line of veRL's."""
PLAIN_NAMES = ("problem", "response")
"""Keys of prompt and response in a line that is no host's."""


@dataclass(frozen=True)
class RecordedResponse:
    """One response of a recorded rollout."""

    problem: int
    """Number of its prompt among those of the file."""
    step: int
    """Training step that it is of."""
    run: int
    """Policy that wrote it, where a file holds several; responses of one problem, step
    and run are siblings.
    """
    prompt: Int32
    """Token ids, shape (p,)."""
    tokens: Int32
    """Token ids of the response, shape (n,), n >= 1."""
    ahead: Tokens = ()
    """Text that would have been written ahead of it, token ids."""

    @property
    def batch(self) -> tuple[int, int]:
        """Step and run: responses with the same are written at the same time."""
        return self.step, self.run


def steps_of(responses: Iterable[RecordedResponse]) -> list[list[RecordedResponse]]:
    """Return the responses of each step, in turn; what several runs wrote in one step
    are steps of their own, since none of these policies saw what another wrote.
    """
    batch = attrgetter("batch")
    ordered = sorted(responses, key=batch)
    steps = []
    for _, of_batch in itertools.groupby(ordered, key=batch):
        steps.append(list(of_batch))
    return steps


def written_ahead(
    responses: Sequence[RecordedResponse],
    agreement: float,
) -> list[RecordedResponse]:
    """Return responses with what was written ahead of them: their own tokens up to the
    first that is not the same, as each is with this chance, and then those of a
    response of their problem in another step, if there is one.
    """
    rng = np.random.default_rng(0)
    by_problem = _by_problem(responses)
    disagreement = 1.0 - agreement
    first_different = rng.geometric(disagreement, len(responses))
    num_same = first_different - 1
    found = []
    for response, same in zip(responses, num_same, strict=True):
        siblings = by_problem[response.problem]
        others = _of_other_batches(response, siblings)
        text = response.tokens
        rest = text[:0]
        if others:
            chosen = rng.integers(len(others))
            other = others[chosen]
            rest = other.tokens[same:]
        ahead = np.concatenate([text[:same], rest])
        found.append(replace(response, ahead=ahead))
    return found


def _by_problem(
    responses: Iterable[RecordedResponse],
) -> dict[int, list[RecordedResponse]]:
    """Return responses by the number of their problem."""
    found: dict[int, list[RecordedResponse]] = {}
    for response in responses:
        siblings = found.setdefault(response.problem, [])
        siblings.append(response)
    return found


def _of_other_batches(
    response: RecordedResponse,
    siblings: Iterable[RecordedResponse],
) -> list[RecordedResponse]:
    """Return the responses of the same problem in other steps and runs, batch after
    batch, as they first come.
    """
    batches: dict[tuple[int, int], list[RecordedResponse]] = {}
    for sibling in siblings:
        batch = batches.setdefault(sibling.batch, [])
        batch.append(sibling)
    batches.pop(response.batch)
    found = list[RecordedResponse]()
    for batch in batches.values():
        found += batch
    return found


def read(path: Path, tokenizer: str | None = None) -> list[RecordedResponse]:
    """Read the responses of a file, or of all files of a directory.

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
            responses = _from_arrays(path)
        else:
            responses = _from_files(path, tokenizer)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DasError(f"{path}: {error}") from None
    if not responses:
        raise DasError(f"{path}: found no rollout with a response")
    return responses


def _from_files(path: Path, tokenizer: str | None) -> list[RecordedResponse]:
    """Read a file of JSON lines, or all of a directory but NeMo-RL's validations."""
    files = [path]
    if path.is_dir():
        files = _training_files(path)
    problems = _numbers()
    runs = _numbers()
    tokenize: Tokenize | None = None
    if tokenizer:
        tokenize = _tokenizer(tokenizer)
    found = list[RecordedResponse]()
    for file in files:
        found += _from_lines(file, problems, runs, tokenize)
    return found


def _training_files(directory: Path) -> list[Path]:
    """Return the files of JSON lines in a directory but NeMo-RL's validations."""
    files = []
    for file in sorted(directory.glob("*.jsonl")):
        if file.name.startswith("val_data_step"):
            continue
        files.append(file)
    return files


def _numbers() -> defaultdict[str, int]:
    """Return numbers of names, in the order in which they are first asked for."""
    counter = itertools.count()
    return defaultdict(counter.__next__)


def _from_arrays(path: Path) -> list[RecordedResponse]:
    with np.load(path) as archive:
        lacking = {"ids", "offsets", "problem"} - set(archive.files)
        if lacking:
            names = ", ".join(sorted(lacking))
            raise DasError(f"{path}: lacks the arrays {names}")
        arrays = {name: archive[name] for name in archive.files}
    ids = arrays["ids"].astype(np.int32)
    offsets = arrays["offsets"]
    problems = arrays["problem"]
    zero = np.zeros(len(problems), dtype=np.int32)
    steps = arrays.get("step", zero)
    runs = arrays.get("run", zero)
    prompts = _prompts(arrays)
    found = []
    for i, problem in enumerate(problems.tolist()):
        begin = offsets[i]
        end = offsets[i + 1]
        tokens = ids[begin:end]
        if not len(tokens):
            continue
        response = RecordedResponse(
            problem=problem,
            step=int(steps[i]),
            run=int(runs[i]),
            prompt=prompts[problem],
            tokens=tokens,
        )
        found.append(response)
    return found


def _prompts(arrays: dict[str, Any]) -> list[Int32]:
    """Return the token ids of each problem's prompt; none where the file has none."""
    if "prompt_ids" in arrays:
        prompt_ids = arrays["prompt_ids"].astype(np.int32)
        inner_ends = arrays["prompt_offsets"][1:-1]
        return np.split(prompt_ids, inner_ends)
    last_problem = int(arrays["problem"].max(initial=-1))
    no_prompt = np.zeros(0, dtype=np.int32)
    return [no_prompt] * (last_problem + 1)


def _from_lines(
    path: Path,
    problems: dict[str, int],
    runs: dict[str, int],
    tokenize: Tokenize | None,
) -> Iterator[RecordedResponse]:
    default_step = _step_in_name(path.name)
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, tokens = _texts(row, tokenize)
            step = int(row.get("step", default_step))
        except (json.JSONDecodeError, KeyError, TypeError, IndexError) as error:
            raise DasError(
                f"{path}:{number}: no rollout ({error!r}); allowed: veRL's"
                " input/output, NeMo-RL's token_ids/token_loss_mask, or"
                " problem/response"
            ) from None
        if not len(tokens):
            continue
        model = row.get("model", "")
        run = row.get("run", model)
        problem = row.get("problem_id", prompt.tobytes())
        problem_key = str(problem)
        run_key = str(run)
        yield RecordedResponse(
            problem=problems[problem_key],
            step=step,
            run=runs[run_key],
            prompt=prompt,
            tokens=tokens,
        )


def _step_in_name(name: str) -> int:
    """Return the training step that a file's name tells; 0: it tells none."""
    found = re.search(r"step_?(\d+)|^(\d+)\.", name)
    if found is None:
        return 0
    return int(found[1] or found[2])


def _texts(row: dict[str, Any], tokenize: Tokenize | None) -> tuple[Int32, Int32]:
    """Return the token ids of the prompt and of the response of a JSON line."""
    if "token_ids" in row:
        return _masked_texts(row)
    names = PLAIN_NAMES
    if "output" in row:
        names = VERL_NAMES
    prompt_name, response_name = names
    prompt = _ids(row[prompt_name], tokenize)
    response = _ids(row[response_name], tokenize)
    return prompt, response


def _ids(text: str, tokenize: Tokenize | None) -> Int32:
    if tokenize is None:
        raise ValueError(
            "holds text and no token ids; name the policy's tokenizer (--tokenizer)"
        )
    return np.array(tokenize(text), dtype=np.int32)


def _masked_texts(row: dict[str, Any]) -> tuple[Int32, Int32]:
    """Return prompt and response of NeMo-RL's line: one padded sequence, and a mask of
    what the policy wrote.
    """
    padded = np.array(row["token_ids"], dtype=np.int32)
    tokens = padded.reshape(-1)
    input_lengths = row.get("input_lengths", len(tokens))
    lengths = np.array(input_lengths).reshape(-1)
    length = int(lengths[0])
    loss_mask = np.array(row["token_loss_mask"]).reshape(-1)
    mask = loss_mask.astype(bool)
    written = mask[: len(tokens)]
    if written.any():
        first = int(np.argmax(written))
    else:
        first = length
    text = tokens[:length]
    response = text[written[:length]]
    return tokens[:first], response


def _tokenizer(name: str) -> Tokenize:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    return lambda text: tokenizer.encode(text, add_special_tokens=False)
