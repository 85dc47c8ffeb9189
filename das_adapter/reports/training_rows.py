"""Write the texts of a saved history as rows on which `speculators` trains a drafter: a
data set of Hugging Face's on disk, as `speculators prepare-data` writes it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from das_adapter.core.index import OTHERS, SuffixIndex
from das_adapter.core.index.store import problems_in
from das_adapter.core.index.values import Int32, Int64
from das_adapter.errors import DasError
from das_adapter.service import checkpoint
from das_adapter.service.prompts import read_prompts

_BATCH_TOKENS = 1 << 20
"""Tokens that are written together: what is held in memory beside one problem's
texts.
"""
_AGES = 256
"""Ages that `SuffixIndex.flat` tells apart, in visits of a problem."""
_BEGIN = -1
"""What stands before a text in `SuffixIndex.flat`."""
_MIDDLE = -2
"""What stands there before a stretch of a text whose beginning is not there."""
_WORDS = 2**40
"""More words than any problem takes there: nothing is thinned out."""
_FREQUENCIES = "token_freq.pt"
"""File with which `speculators` chooses the vocabulary of a drafter."""


class Exported(NamedTuple):
    """What was written, and what was left out."""

    rows: int
    problems: int
    """Problems with a row."""
    prompt_tokens: int
    response_tokens: int
    problems_without_prompt: int
    """Problems that have texts, but no prompt."""
    stretches: int
    """Parts of responses whose beginning was thinned out."""


class _Text(NamedTuple):
    problem: int
    age: int
    """Visits of its problem since it was written; 0: it is of the newest."""
    prompt: Int32
    response: Int32


class _Counts:
    """Counts what is written and left out."""

    def __init__(self) -> None:
        self.rows = 0
        self.problems = set[int]()
        self.prompt_tokens = 0
        self.response_tokens = 0
        self.without_prompt = set[int]()
        self.stretches = 0
        self.frequencies = Counter[int]()
        """How often each token is in a response."""

    def add(self, text: _Text) -> None:
        self.rows += 1
        self.problems.add(text.problem)
        self.prompt_tokens += len(text.prompt)
        self.response_tokens += len(text.response)
        ids, counts = np.unique(text.response, return_counts=True)
        numbers = zip(ids.tolist(), counts.tolist(), strict=True)
        self.frequencies.update(dict(numbers))


def export(
    folder: Path, out: Path, visits: int | None = None, max_tokens: int | None = None
) -> Exported:
    """Write the responses of a saved history, each behind its problem's prompt, to a
    new directory. A problem's rows follow each other, the oldest first.

    A row has `input_ids` (int32 [tokens], the prompt's and the response's), `loss_mask`
    (int8 [tokens], 1 on the response) and `seq_len`.

    Args:
        folder: a directory `das_history`, or a checkpoint that has one.
        visits: visits of each problem whose responses are written, the newest; None:
            all.
        max_tokens: tokens of all responses together, at most; the newest visits of all
            problems go before older ones. None: no limit.

    Raises:
        DasError: there is no history, it is damaged or tells no problems apart, no
            response has a prompt, or `out` is there.
        OSError: it can't be read or written.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DasError(f"--out: found {str(out)!r}, allowed: a new directory")
    parts = _parts_of(folder)
    limit = _Limit(_AGES if visits is None else visits)
    if max_tokens is not None:
        limit = _limit_tokens(_texts(parts, _Counts()), limit.ages, max_tokens)
    counts = _Counts()
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{out.name}.", dir=out.parent))
    try:
        chosen = filter(limit.admits, _texts(parts, counts))
        _write(partial, chosen, counts)
        if not counts.rows:
            raise DasError(
                f"FOLDER: found no response that has a prompt in {str(folder)!r}:"
                f" {len(counts.without_prompt)} problems without a prompt,"
                f" {counts.stretches} parts of responses without their beginning;"
                " allowed: a history that veRL or NeMo-RL has saved with prompts, and"
                " limits that leave a response"
            )
        (partial / "set").rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(
        rows=counts.rows,
        problems=len(counts.problems),
        prompt_tokens=counts.prompt_tokens,
        response_tokens=counts.response_tokens,
        problems_without_prompt=len(counts.without_prompt),
        stretches=counts.stretches,
    )


def _parts_of(folder: Path) -> list[Path]:
    """Return the files of a saved history's index; DasError: it can't be exported."""
    inside = folder / checkpoint.NAME
    directory = inside if inside.is_dir() else folder
    facts, _ = checkpoint.read(directory, "FOLDER")
    scope = facts.get("scope")
    if scope == "global":
        raise DasError(
            f"FOLDER: found history.scope {scope!r} in {str(directory)!r}, which does"
            " not tell whose text is whose; allowed: 'problem'"
        )
    return checkpoint.index_files(directory)


def _texts(parts: Sequence[Path], counts: _Counts) -> Iterator[_Text]:
    """Yield the texts of a saved history that have a prompt, problem by problem, the
    oldest first; count the others.
    """
    for part in parts:
        prompts = read_prompts(checkpoint.prompts_file(part))
        index = SuffixIndex()
        index.map_guest_history(part)
        for problem in np.unique(problems_in(part)).tolist():
            if problem == OTHERS:
                continue
            if problem not in prompts:
                counts.without_prompt.add(problem)
                continue
            prompt = np.frombuffer(prompts[problem], np.int32)
            for age, response in _responses(index, problem, counts):
                yield _Text(problem, age, prompt, response)


def _responses(
    index: SuffixIndex, problem: int, counts: _Counts
) -> Iterator[tuple[int, Int32]]:
    """Yield the age of each response to a problem, and its token ids."""
    tokens, places = index.flat(problem, _WORDS)
    # as tokens  -1  a  b  -1  c  -1: texts "a b" and "c"
    bounds = np.flatnonzero(tokens < 0)
    positions = places & 0xFFFFFF
    ages = np.zeros(len(tokens), np.uint32)
    ages[positions] = places >> 24
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if tokens[begin] == _MIDDLE:
            counts.stretches += 1
        elif end > begin + 1:
            yield int(ages[begin]), tokens[begin + 1 : end]


class _Limit:
    """Admits the texts of the newest visits."""

    def __init__(self, ages: int, rest_tokens: int = 0) -> None:
        """Admit all texts of fewer visits ago than `ages`, and so many tokens of the
        visit before.
        """
        self.ages = ages
        self._rest_tokens = rest_tokens

    def admits(self, text: _Text) -> bool:
        """Return whether a text is to be written."""
        if text.age != self.ages:
            return text.age < self.ages
        fits = len(text.response) <= self._rest_tokens
        if fits:
            self._rest_tokens -= len(text.response)
        return fits


def _limit_tokens(texts: Iterator[_Text], ages: int, max_tokens: int) -> _Limit:
    """Return the limit that admits so many tokens of responses, of the newest `ages`
    visits.
    """
    tokens_by_age: Int64 = np.zeros(_AGES + 1, np.int64)
    for text in texts:
        tokens_by_age[text.age] += len(text.response)
    sums = np.cumsum(tokens_by_age)
    fitting = int(np.searchsorted(sums, max_tokens, "right"))
    if fitting >= ages:
        return _Limit(ages)
    newer_tokens = int(sums[fitting - 1]) if fitting else 0
    return _Limit(fitting, max_tokens - newer_tokens)


def _write(folder: Path, texts: Iterator[_Text], counts: _Counts) -> None:
    """Write the data set `set` into a folder, from a file that is mapped and not read,
    and count its rows.
    """
    try:
        import datasets
        import pyarrow
        import torch
    except ModuleNotFoundError as error:
        raise DasError(
            f"found no package {error.name!r}; allowed: an environment with datasets"
            " and torch, such as that of speculators"
        ) from None

    ids = pyarrow.list_(pyarrow.int32())
    mask = pyarrow.list_(pyarrow.int8())
    columns = {"input_ids": ids, "loss_mask": mask, "seq_len": pyarrow.int32()}
    schema = pyarrow.schema(columns)
    file = folder / "rows.arrow"
    with pyarrow.ipc.new_stream(file, schema) as stream:
        for batch in _batches(texts):
            for text in batch:
                counts.add(text)
            stream.write_batch(_record_batch(batch, schema))
    if not counts.rows:
        return
    rows = datasets.Dataset.from_file(str(file))
    datasets.disable_progress_bars()
    rows.with_format("torch").save_to_disk(folder / "set")
    torch.save(dict(counts.frequencies), folder / "set" / _FREQUENCIES)


def _batches(texts: Iterator[_Text]) -> Iterator[list[_Text]]:
    """Yield texts in batches of so many tokens at least, but for the last."""
    batch = []
    num_tokens = 0
    for text in texts:
        batch.append(text)
        num_tokens += len(text.prompt) + len(text.response)
        if num_tokens >= _BATCH_TOKENS:
            yield batch
            batch = []
            num_tokens = 0
    if batch:
        yield batch


def _record_batch(texts: Sequence[_Text], schema: Any) -> Any:
    """Return rows as pyarrow's record batch."""
    import pyarrow

    ids = []
    masks = []
    lengths = []
    for text in texts:
        row = np.concatenate([text.prompt, text.response])
        mask = np.ones(len(row), np.int8)
        mask[: len(text.prompt)] = 0
        ids.append(row)
        masks.append(mask)
        lengths.append(len(row))
    offsets = np.cumsum([0, *lengths], dtype=np.int32)
    columns = [
        pyarrow.ListArray.from_arrays(offsets, np.concatenate(ids)),
        pyarrow.ListArray.from_arrays(offsets, np.concatenate(masks)),
        pyarrow.array(lengths, pyarrow.int32()),
    ]
    return pyarrow.record_batch(columns, schema=schema)
