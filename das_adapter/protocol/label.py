"""The label of a request: what a host tells the engine about it."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from das_adapter.core.identity import FirstTurns, prompt_identity, request_seed
from das_adapter.errors import DasError

_LARGEST = {
    "problem": 2**64 - 2,
    "seed": 2**63 - 1,
    "record": 1,
    "start": 2**31 - 1,
}
"""The fields of a label, `das_` before them in `extra_args`, and their largest
values.
"""

Params = Mapping[str, Any]
"""A request's sampling parameters, or the `extra_args` in them."""
Hashes = Sequence[str]
"""Hashes of a prompt's images, sound and video."""

_PREFIX = "das_"
_AHEAD = "das_ahead"
"""Key of `Label.ahead`, in `extra_args` of a host's requests alone: JSON has no
bytes.
"""


class BadLabel(DasError, ValueError):
    """A request's label that no host has written, or that the server does not take from
    its clients.
    """


@dataclass(frozen=True, slots=True)
class Label:
    """A request's label. It travels in `SamplingParams.extra_args` as flat integers, so
    that the OpenAI server's `vllm_xargs` can carry it.
    """

    problem: int | None = None
    """64-bit identity of the problem; None: its prompt's."""
    seed: int | None = None
    """Seed of the keyed noise, 63 bits; sample i of a request with `n` of them has seed
    + i. None: `SamplingParams.seed`, and where there is none, any.
    """
    record: bool = True
    """Whether the text may serve as history and counts as training; False for a
    validation's.
    """
    start: int | None = None
    """Where the text begins that is in no history yet, in tokens of the prompt: what a
    resumed request has written already and a tool's answer lie behind it. None: at the
    prompt's end.
    """
    ahead: bytes | None = None
    """What was written ahead of the response, with the same noise, int32 token ids;
    drafts repeat it.
    """

    @classmethod
    def of(cls, extra_args: Params | None) -> Label:
        """Read a request's `extra_args`, which a stranger may have written; what they
        don't say has its default.

        Raises:
            BadLabel: a value is no integer, or out of range, or no field of a label has
                this name.
        """
        given = extra_args or {}
        _refuse_unknown_keys(given)
        values: dict[str, int] = {}
        for name in _LARGEST:
            key = _PREFIX + name
            if key not in given:
                continue
            value = given[key]
            values[name] = _read_integer(name, value)
        ahead = given.get(_AHEAD)
        if not isinstance(ahead, bytes | None):
            raise BadLabel(f"{_AHEAD}: found {ahead!r:.100}, allowed: bytes")
        record = values.get("record", True)
        return cls(
            problem=values.get("problem"),
            seed=values.get("seed"),
            record=bool(record),
            start=values.get("start"),
            ahead=ahead,
        )

    def extra_args(self) -> dict[str, int | bytes]:
        """Return the entries of `extra_args` that `of` reads back."""
        entries: dict[str, int | bytes] = {}
        if self.ahead is not None:
            entries[_AHEAD] = self.ahead
        for name in _LARGEST:
            value = getattr(self, name)
            if value is None:
                continue
            key = _PREFIX + name
            entries[key] = int(value)
        return entries

    def put_into(self, params: Params) -> dict[str, Any]:
        """Return sampling parameters with this label in their `extra_args`."""
        given = params.get("extra_args") or {}
        extra_args = dict(given)
        extra_args.update(self.extra_args())
        with_label = dict(params)
        with_label["extra_args"] = extra_args
        return with_label

    def problem_of(self, prompt_ids: npt.ArrayLike, media: Hashes = ()) -> int:
        """Return the problem that a request with this prompt is about; `media`: hashes
        of the prompt's images.
        """
        if self.problem is not None:
            return self.problem
        return prompt_identity(prompt_ids, *media)

    def start_in(self, prompt_tokens: int) -> int:
        """Return `start` in a prompt of so many tokens."""
        if self.start is None:
            return prompt_tokens
        return min(self.start, prompt_tokens)


Drawn = Counter[tuple[int, bool]]


class Labeller:
    """Labels requests. The n-th request of a prompt gets the same seed in every run,
    whatever else is asked before.
    """

    COUNTED = 2**18
    """Problems whose requests are counted, at most; then counting begins anew, with
    other seeds. Prompts of later turns are counted as well, the newest of them: so
    many; what is forgotten counts as new, with the same seeds.
    """

    def __init__(
        self,
        run_seed: int,
        source: str = "",
        resumed: int = 0,
        joins_turns: bool = True,
        guesses: bool = False,
    ):
        """Label nothing yet.

        Args:
            source: tells labellers apart that count the same problems independently,
                such as those of two HTTP servers.
            resumed: training step from which the run resumes: what was drawn before is
                not drawn again.
            joins_turns: whether a prompt that begins with an earlier one belongs to
                that one's problem.
            guesses: whether `validate` of a prompt says only that a validation goes on:
                a later turn belongs to it if its first turn did.
        """
        self._run_seed = run_seed
        self._resumed = resumed
        self._source = source
        self._first_turns = FirstTurns() if joins_turns else None
        self._drawn = Drawn()
        """Requests for each prompt of a first turn, by (prompt, validation)."""
        self._drawn_later = Drawn()
        """Requests for each prompt of a later turn, as in `_drawn`."""
        self._guesses = guesses
        self._validated = set[int]()
        """Problems whose latest first turn was a validation's, where that is
        guessed.
        """
        self._counts = 0
        """How often counting began anew."""

    @property
    def has_later_turns(self) -> bool:
        """Whether there have been prompts of later turns."""
        return bool(self._drawn_later)

    def copy(self) -> Labeller:
        """Return a labeller that labels the requests that come next as this one would;
        it changes nothing here.
        """
        other = copy.copy(self)
        other._drawn = self._drawn.copy()
        other._drawn_later = self._drawn_later.copy()
        other._validated = self._validated.copy()
        if self._first_turns is not None:
            other._first_turns = self._first_turns.copy()
        return other

    def label(
        self,
        prompt: Any,
        validate: bool,
        media: Hashes = (),
    ) -> Label:
        """Label a request with a prompt (token ids without padding, and the hashes of
        its images, sound and video); `validate`: its text must stay out of the
        history.
        """
        ids = np.asarray(prompt, dtype=np.int32)
        # not the problem: its samples' later turns come in any order
        asked = prompt_identity(ids, *media)
        problem = asked
        if self._first_turns is not None:
            problem = self._first_turns.problem(ids, media)
        is_first_turn = asked == problem
        drawn = self._drawn_later
        if is_first_turn:
            drawn = self._drawn
        if self._guesses:
            validate = self._guess_validation(problem, is_first_turn, validate)
        key = asked, validate
        number = drawn[key]
        drawn[key] = number + 1
        seed = self._seed(asked, validate, number)
        self._forget()
        return Label(
            problem=problem,
            seed=seed,
            record=not validate,
        )

    def _guess_validation(
        self,
        problem: int,
        is_first_turn: bool,
        validate: bool,
    ) -> bool:
        """Return whether a request belongs to a validation: its first turn says it."""
        if not is_first_turn:
            return problem in self._validated
        if validate:
            self._validated.add(problem)
        else:
            self._validated.discard(problem)
        return validate

    def _seed(self, asked: int, validate: bool, number: int) -> int:
        """Return the seed of a prompt's request with this number."""
        purpose = ""
        if validate:
            purpose = "validation"
        row = f"{self._source}/{self._counts}/{purpose}"
        return request_seed(
            run_seed=self._run_seed,
            problem=asked,
            step=self._resumed,
            sample=number,
            row=row,
        )

    def _forget(self) -> None:
        """Keep the counts of no more than `COUNTED` prompts of each kind."""
        if len(self._drawn) >= self.COUNTED:
            self._drawn.clear()
            self._counts += 1
        later = self._drawn_later
        if len(later) > self.COUNTED:
            oldest = next(iter(later))
            del later[oldest]


def _refuse_unknown_keys(extra_args: Params) -> None:
    allowed = [_PREFIX + name for name in _LARGEST]
    for key in extra_args:
        if key == _AHEAD or key in allowed:
            continue
        if key.startswith(_PREFIX):
            names = ", ".join(allowed)
            raise BadLabel(f"{key:.100}: unknown key, allowed: {names}")


def _read_integer(name: str, value: Any) -> int:
    """Return a value of a label; JSON may carry a large integer as text."""
    largest = _LARGEST[name]
    number = value
    try:
        if isinstance(value, str):
            number = int(value)
        number = operator.index(number)
    except (TypeError, ValueError):
        number = -1
    if not 0 <= number <= largest:
        raise BadLabel(
            f"das_{name}: found {value!r:.100}, allowed: an integer from 0 to {largest}"
        )
    return number
