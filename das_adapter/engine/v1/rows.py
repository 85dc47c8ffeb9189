"""The rows of logits of a verified batch: each request's drafted positions, then one more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from das_adapter.engine.v1.processors import beside, of_rows

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """The rows of neighbouring requests of a batch."""

    drafted: Ints
    """Draft tokens of each of these requests, [requests]; each has one row more."""
    first: int = 0
    """Index of the first of them in the batch."""
    begin: int = 0
    """Index of its first row."""

    @cached_property
    def starts(self) -> Ints:
        """Where each request's rows start, counted from `begin`, and where the last one's end, [requests + 1]."""
        return np.concatenate([[0], np.cumsum(self.drafted + 1)])

    @property
    def requests(self) -> Ints:
        """Index of each row's request in the batch, [rows]."""
        return self.first + np.repeat(np.arange(len(self.drafted)), self.drafted + 1)

    @property
    def span(self) -> slice:
        """These rows in the batch's."""
        return slice(self.begin, self.begin + int(self.starts[-1]))

    def of(self, request: int) -> slice | None:
        """Return the rows of a request of the batch, counted from `begin`; None: they are not among these."""
        i = request - self.first
        return slice(*self.starts[i : i + 2].tolist()) if 0 <= i < len(self.drafted) else None

    def parts(self, most: int) -> Iterator[Rows]:
        """Cut into parts of `most` rows, or of one request that has more."""
        first = 0
        while first < len(self.drafted):
            begin = int(self.starts[first])
            last = max(first + 1, int(np.searchsorted(self.starts, begin + most, side="right")) - 1)
            yield Rows(self.drafted[first:last], self.first + first, self.begin + begin)
            first = last

    def padded(self, width: int, nothing: int) -> tuple[Ints, Ints]:
        """Lay the rows out as vLLM's sampler returns them: each request's beside one another.

        Args:
            width: most draft tokens of a request.
            nothing: stands where a draft is shorter than that.

        Returns:
            The row of each place, [requests, width + 1]; behind a request's last row any valid one. The index of each
            draft token among all, [requests, width].
        """
        offsets, begins = np.arange(width + 1), self.starts[:-1, None]
        tokens = begins - np.arange(len(begins))[:, None] + offsets[:-1]
        inside = offsets[:-1] < self.drafted[:, None]
        return np.minimum(begins + offsets, self.starts[-1] - 1), np.where(inside, tokens, nothing)


def by_row(
    sampling: SamplingMetadata,
    metadata: SpecDecodeMetadata,
    rows: Rows,
    logits: torch.Tensor,
    positions: torch.Tensor | None,
) -> SamplingMetadata:
    """Return sampling metadata with one entry for each of some rows instead of one for each request of the batch;
    `logits` and `positions` (as in `Keys`) are of these rows."""
    at = beside(rows.requests, logits)
    names = ["temperature", "top_p", "top_k", "allowed_token_ids_mask"]
    if not sampling.no_penalties:
        names += ["prompt_token_ids", "frequency_penalties", "presence_penalties", "repetition_penalties"]
    given = {name: getattr(sampling, name) for name in names}
    spread: dict[str, Any] = {name: None if value is None else value[at] for name, value in given.items()}
    if sampling.bad_words_token_ids or not sampling.no_penalties:
        spread |= _texts(sampling, metadata, rows)
    processors: Any = of_rows(sampling.logitsprocs, rows.of, rows.requests, positions)
    return replace(sampling, generators={}, spec_token_ids=None, logitsprocs=processors, **spread)


def _texts(sampling: SamplingMetadata, metadata: SpecDecodeMetadata, rows: Rows) -> dict[str, Any]:
    """Return what each row's request has written, the draft up to the row included, and its forbidden words."""
    before = rows.begin - rows.first
    drafts = metadata.draft_token_ids[before : before + int(rows.drafted.sum())].tolist()
    texts, words = [], {}
    for row, request in enumerate(rows.requests.tolist()):
        begin = int(rows.starts[request - rows.first])
        at = begin - (request - rows.first)
        texts.append(sampling.output_token_ids[request] + drafts[at : at + row - begin])
        if request in sampling.bad_words_token_ids:
            words[row] = sampling.bad_words_token_ids[request]
    return {"output_token_ids": texts, "bad_words_token_ids": words}
