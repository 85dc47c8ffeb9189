"""Read recorded rollouts: veRL's and NeMo-RL's dumps, and plain ones."""

from __future__ import annotations

import itertools
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from das_adapter import tables
from das_adapter.core.index.values import Int32, Tokens
from das_adapter.errors import DasError

Tokenize = Callable[[str], "list[int]"]
_PROMPTS = ("input", "problem", "prompt", "question", "prompt_ids", "prompt_token_ids")
_RESPONSES = (
    "output",
    "response",
    "completion",
    "completion_ids",
    "response_ids",
    "response_token_ids",
)
"""Keys of prompt and response in a row, the first that it has: veRL's, those of plain
rollouts, TRL's. The value is text, token ids or messages.
"""
_TOOL_OUTPUT = re.compile(
    r"""(\n?(<\|im_start\|>)?(user|tool)\n)?   # a turn begins
    <tool_response>.*?(</tool_response>|\Z)
    ((<\|im_end\|>)?\n(<\|im_start\|>)?assistant\n)?  # the policy's own next""",
    re.DOTALL | re.VERBOSE,
)
"""What a tool said, in a response's text. Neither veRL's dumps nor TRL's have a mask of
what the policy wrote.
"""
_WANTED = (
    "rollouts: veRL's trainer.rollout_data_dir (input/output), NeMo-RL's"
    " train_data_step*.jsonl (token_ids/token_loss_mask), TRL's completions*.parquet"
    " (prompt/completion), rows with problem or prompt and response, or an .npz"
)
MOST_FIELDS = 8
"""Fields of a row that a message names, at most."""
_DUMPS = (".jsonl", ".parquet")
"""Names of the files of a directory that hold rollouts end so."""


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
    tool_characters: int = 0
    """Characters that tools wrote between its tokens, which are left out."""

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
            `prompt_offsets`), a file that `tables.read` reads, or a directory of JSON
            lines or parquet, of which NeMo-RL's validations are left out. A row is
            NeMo-RL's (`token_ids` and `token_loss_mask`), or has a prompt, a response
            (see `_PROMPTS`, `_RESPONSES`) and perhaps `step`, `run` or `model`.
        tokenizer: name or folder of a Hugging Face tokenizer; needed where a dump holds
            text and no token ids.

    Raises:
        DasError: there is no such file, it is none of these, or it holds text and there
            is no tokenizer.
    """
    if path.suffix == ".npz":
        try:
            responses = _from_arrays(path)
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise DasError(f"{path}: {error}; expected {_WANTED}") from None
    else:
        responses = _from_files(path, tokenizer)
    if not responses:
        raise DasError(f"{path}: found no rollout with a response; expected {_WANTED}")
    return responses


def _from_files(path: Path, tokenizer: str | None) -> list[RecordedResponse]:
    """Read a file, or all of a directory but NeMo-RL's validations."""
    paths = [path]
    if path.is_dir():
        paths = _training_files(path)
    problems = _numbers()
    runs = _numbers()
    tokenize: Tokenize | None = None
    if tokenizer:
        tokenize = _tokenizer(tokenizer)
    found = list[RecordedResponse]()
    for file in paths:
        found += _from_rows(file, problems, runs, tokenize)
    return found


def _training_files(directory: Path) -> list[Path]:
    """Return the files of rollouts in a directory but NeMo-RL's validations, and those
    to which nothing was written.

    Raises:
        DasError: there are none.
    """
    found = []
    for file in tables.named(directory, _DUMPS):
        is_validation = file.name.startswith("val_data_step")
        if not is_validation and file.stat().st_size:
            found.append(file)
    if found:
        return found
    hint = ""
    below = [str(place) for place in tables.below(directory, _DUMPS)]
    if below:
        hint = f", but in {', '.join(below[:3])}: name one of these"
    raise DasError(
        f"{directory}: no .jsonl or .parquet of rollouts here{hint}; expected {_WANTED}"
    )


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


def _from_rows(
    path: Path,
    problems: dict[str, int],
    runs: dict[str, int],
    tokenize: Tokenize | None,
) -> Iterator[RecordedResponse]:
    default_step = _step_in_name(path.name)
    table = tables.read(path, _WANTED)
    for number, row in zip(table.numbers, table.rows, strict=True):
        try:
            prompt, tokens, tool_characters = _texts(row, tokenize)
            step = _step(row.get("step"), default_step)
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise DasError(
                f"{path}:{number}: no rollout: {_reason(error, row)}; expected"
                f" {_WANTED}"
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
            tool_characters=tool_characters,
        )


def _step(value: Any, default: int) -> int:
    """Return the training step that a row tells, or else its file."""
    if value in (None, ""):
        return default
    try:
        return int(float(value))
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"found step={value!r:.40}, expected a number") from None


def _reason(error: Exception, row: Mapping[str, Any]) -> str:
    """Say why a row is no rollout."""
    if isinstance(error, ValueError):
        return str(error)
    return f"found {_fields(row)} with values of other types"


def _fields(row: Mapping[str, Any]) -> str:
    """Name a row's first fields."""
    names = [str(name) for name in row]
    more = ", ..." if len(names) > MOST_FIELDS else ""
    return f"the fields {', '.join(names[:MOST_FIELDS])}{more}"


def _step_in_name(name: str) -> int:
    """Return the training step that a file's name tells; 0: it tells none."""
    found = re.search(r"step_?(\d+)|^(\d+)\.", name)
    if found is None:
        return 0
    return int(found[1] or found[2])


def _texts(
    row: Mapping[str, Any],
    tokenize: Tokenize | None,
) -> tuple[Int32, Int32, int]:
    """Return the token ids of the prompt and of the response of a row, and the
    characters of tools that the response is without.
    """
    if "token_ids" in row and "token_loss_mask" in row:
        return *_masked_texts(row), 0
    prompt = _first(row, _PROMPTS)
    response = _first(row, _RESPONSES)
    tool_characters = 0
    if isinstance(response, str):
        own = _TOOL_OUTPUT.sub("", response)
        tool_characters = len(response) - len(own)
        response = own
    return _ids(prompt, tokenize), _ids(response, tokenize), tool_characters


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the value of the first of these keys under which a row has text, token
    ids or messages.
    """
    for name in names:
        if isinstance(row.get(name), str | list):
            return row[name]
    raise ValueError(f"found {_fields(row)}, needed: one of {', '.join(names)}")


def _ids(content: str | list[Any], tokenize: Tokenize | None) -> Int32:
    """Return the token ids of a text, of messages, or of token ids."""
    if isinstance(content, list):
        if all(isinstance(token, int) for token in content):
            return np.array(content, dtype=np.int32)
        content = "\n".join(_content(message) for message in content)
    if tokenize is None:
        raise ValueError(
            "it holds text and no token ids: name the policy's tokenizer (--tokenizer)"
        )
    return np.array(tokenize(content), dtype=np.int32)


def _content(message: Any) -> str:
    """Return the text of a message of a conversation; none of a tool's."""
    if not isinstance(message, Mapping):
        raise ValueError(f"found {message!r:.60}, expected a message or a token id")
    if message.get("role") == "tool":
        return ""
    return str(message.get("content") or "")


def _masked_texts(row: Mapping[str, Any]) -> tuple[Int32, Int32]:
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
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise DasError("--tokenizer: needs transformers, which is not here") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DasError(f"--tokenizer: found {name!r}: {reason}") from None
    return lambda text: tokenizer.encode(text, add_special_tokens=False)
