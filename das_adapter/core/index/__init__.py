"""Suffix index: drafts a request's next tokens from its problem's history, its live
siblings and its own text.

`SuffixIndex` is the native index; `tests/unit/reference_index.py` is the same in plain
Python. `das_adapter.core.index.store.HistoryStore` writes a node's history once, for
every `SuffixIndex.attach` to map.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from das_adapter.core import tuning
from das_adapter.core.index.errors import IndexFileError
from das_adapter.core.index.private import check_owner
from das_adapter.core.index.values import (
    FilePath,
    Float32,
    Int32,
    Int64,
    Number,
    Tokens,
    integers,
    tokens_of,
)
from das_adapter.core.native import native

__all__ = ["OTHERS", "IndexFileError", "SuffixIndex"]

OTHERS = 2**64 - 1
"""The number, no problem's, under which the texts that all problems share are kept."""


class SuffixIndex:
    """An engine's index: per problem, sealed trajectories in flat arrays (7.25 bytes
    per token), and live text.

    The history is what a `HistoryStore` publishes (`map`, `refresh`): the index reads
    it, and the store writes it. Equal calls give equal drafts on every process, however
    the history is cut into segments.

    Any thread may call: each call waits for those before it, the drafting that
    `draft_rows` has begun included. Calls that take long release the GIL.

    The longest matches of the request's context in its problem's texts vote on the
    continuation; where these are short, places that match except for the last token
    vote as well. The longest matches in texts of all problems (`HistoryStore`'s
    `others_tokens`) vote apart, and the token of the two that is likelier to be
    accepted is drafted. Each draft token has an estimated chance to survive
    verification. The index learns it from what requests wrote after their drafts,
    separately for tokens that only the request's own text suggests, those that other
    texts of its problem suggest, too, and those that come from texts of all problems.

    Problems are identified by 0 to 2^64 - 2, token ids are 0 to 2^23 - 1; other numbers
    raise a ValueError or a TypeError, and the handle of a request that is not open a
    ValueError.
    """

    def __init__(self, others: bool = True) -> None:
        """`others`: whether texts of all problems are drafted from, if there are
        some.
        """
        self._core: Any = native().SuffixIndex(others)

    # History

    @staticmethod
    def check(path: FilePath) -> None:
        """Read a file that `HistoryStore.save` wrote, and keep nothing of it.

        Raises:
            IndexFileError: not an index file, of another format version, truncated or
                damaged.
            OSError: the file can't be read.
        """
        native().read_index_file(os.fspath(path), True)

    @classmethod
    def attach(cls, directory: FilePath) -> SuffixIndex:
        """Return an index whose history is mapped; see `map`."""
        index = cls()
        index.map(directory)
        return index

    def map(self, directory: FilePath) -> None:
        """Replace the history by what a `HistoryStore` publishes in `directory`.

        The history is empty as long as nothing is published; live requests and learned
        chances stay. Raises as `refresh`, and an IndexFileError if the directory is a
        link or another user's.
        """
        check_owner(Path(directory))
        self._core.attach(os.fspath(directory), False)

    def refresh(self, generation: int = 0) -> int:
        """Map what the store has published since, at a weight sync; live requests stay
        open, and draft from it.

        Args:
            generation: which of the store's last three generations; 0: the newest. All
                ranks of an engine must map the same one to draft the same tokens.

        Returns:
            The generation that is mapped now; 0 as long as nothing is published.

        Raises:
            IndexFileError: a file is truncated, damaged, foreign or of another format
                version. The history is then what it was. Headers, tables and sizes are
                checked here; a problem's own arrays when it is first used: here if it
                has live requests, else in `open`.
            OSError: a file can't be read; FileNotFoundError: that generation is gone.
        """
        self._core.refresh(generation)
        return self.generation

    def forget_chances(self) -> None:
        """Reduce what was learned of the chances of draft tokens, at a weight sync: the
        new policy may accept other tokens.
        """
        self._core.forget_chances()

    def map_guest_history(self, path: FilePath) -> None:
        """Map the history of problems that have none here, as `HistoryStore.give` wrote
        it; each keeps it until the `clear_live` that finds no live text of it, or until
        `refresh` brings history of its own. The file may be removed afterwards. Raises
        as `refresh`; nothing is mapped then.
        """
        self._core.map_guest_history(os.fspath(path))

    # Live requests

    def open(
        self, problem: int, prompt_ids: Tokens, prefix: Tokens = (), ahead: Tokens = ()
    ) -> int:
        """Start a request; return its handle, above 0 and never used again.

        Args:
            problem: requests of one problem are siblings and draft from each other.
            prompt_ids: searched for this request only. May be empty.
            prefix: response token ids that exist already (a resumed request).
            ahead: response token ids that were written ahead with this request's noise.
                Drafts repeat them until the request writes something else; siblings
                draft from them as from a closed request's.

        Raises:
            IndexFileError: the problem's mapped history is damaged; the request is not
                opened.
        """
        handle = self._core.open(
            problem, tokens_of(prompt_ids), tokens_of(prefix), tokens_of(ahead)
        )
        return int(handle)

    def extend(self, handle: int, ids: Tokens) -> None:
        """Append token ids to a request."""
        self._core.extend(handle, tokens_of(ids))

    def draft(
        self,
        handles: npt.ArrayLike,
        budgets: npt.ArrayLike,
        min_chance: float = tuning.FIXED_CHANCE,
    ) -> tuple[list[Int32], list[Float32]]:
        """Draft as `draft_rows` does, for texts as they are; return one array of tokens
        and one of chances per request.
        """
        no_tokens = np.zeros((1, 0), np.int32)
        zeros = np.zeros(np.size(handles), dtype=np.int64)
        drafting = self.draft_rows(
            integers(handles),
            no_tokens,
            zeros,
            zeros,
            zeros,
            integers(budgets),
            min_chance=min_chance,
        )
        tokens, chances, offsets = drafting.result()
        ends = offsets[1:]
        return np.split(tokens, ends)[:-1], np.split(chances, ends)[:-1]

    def draft_rows(
        self,
        handles: Int64,
        tokens: Int32,
        rows: Int64,
        begins: Int64,
        ends: Int64,
        budgets: Int64,
        min_chance: float = tuning.FIXED_CHANCE,
    ) -> Any:
        """Append accepted token ids to a batch of requests, and draft for them.

        Both happen in a thread without the GIL. If that has not begun by then, or the
        requests are few, both happen where the result is asked for, or where the index
        is used again. Where anything is wrong, nothing is appended.

        Args:
            handles: shape (b,), int64; each request once.
            tokens: shape (m, n), int32, contiguous: where an engine keeps its texts.
            rows, begins, ends: shape (b,), int64; request i gets `tokens[rows[i],
                begins[i]:ends[i]]`.
            budgets: most tokens to draft per request, shape (b,), int64; 0 (or less):
                none, at no cost.
            min_chance: a draft ends before the token whose chance falls under this. 0:
                never.

        Returns:
            An object that waits for the drafts. Its method `result` returns (tokens,
            chances, offsets):
                tokens: shape (n,), int32, the drafts one after the other.
                chances: shape (n,), float32, in (0, 1], not increasing within a draft:
                    the estimated chance that this token and all before it in the draft
                    are accepted.
                offsets: shape (b + 1,), int64; request i's draft is
                    `tokens[offsets[i]:offsets[i + 1]]`.
            `put(rows, keep, largest, lists)` puts the first `keep` tokens of each
            draft, those above `largest` as that, into the list's `rows`.

        Raises:
            ValueError: a request is not open, token ids or stretches are wrong, or
                arrays differ in length.
        """
        return self._core.draft_rows(
            handles, tokens, rows, begins, ends, budgets, min_chance
        )

    def close(self, handle: int, keep: bool = True) -> None:
        """End a request.

        Args:
            keep: whether its siblings draft from its response until `clear_live`; else
                it is forgotten.
        """
        self._core.close(handle, keep)

    def age(self, handle: int) -> int | None:
        """Return the weight versions from the newest history of a request's problem to
        the newest of all problems; None: the problem has no history.
        """
        age = int(self._core.age(handle))
        return None if age < 0 else age

    def flat(
        self, problem: int, max_words: int
    ) -> tuple[Int32, npt.NDArray[np.uint32]]:
        """Return a problem's history as one segment, as a device searches it: the
        newest visits that have 16 million tokens together, or a part of a visit that
        has more. Empty arrays where there is no history. Other calls do not wait for
        it.

        Args:
            problem: whose history; `OTHERS`: the texts of all problems.
            max_words: words of 32 bits that both arrays may take together; above that
                the history is thinned out; of `OTHERS` the newest visits stay.

        Returns:
            tokens: int32 [t]; -1 before each text and at the end, -2 before a stretch
                whose beginning is not there.
            places: uint32 [p], ordered by reversed left context, equal ones latest
                first: in 24 bits the position in `tokens` of the last context token,
                above it in 8 bits the text's age in visits, 255 at most.

        Raises:
            IndexFileError: the problem's mapped history is damaged.
        """
        return self._core.flat(problem, max_words)

    def clear_live(self) -> None:
        """Forget the closed requests' responses (at a weight sync, once they are added
        and sealed); open ones stay.
        """
        self._core.clear_live()

    @property
    def has_others(self) -> bool:
        """Whether requests draft from texts of all problems, and there are some."""
        return bool(self._core.has_others)

    generation = Number("generation")
    """The store's generation that is mapped; 0: none."""
    nbytes = Number("nbytes")
    """Bytes of the sealed history, and of the memory that its problems take beside
    their text; the text of an attached index is shared with all others.
    """
    live_bytes = Number("live_bytes")
    """Bytes of the live text and what finds places in it."""
    tokens = Number("tokens")
    """Tokens of the sealed history."""
    problems = Number("problems")
    """Problems that have some sealed history."""
