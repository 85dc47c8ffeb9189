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

_MOST = {"problem": 2**64 - 1, "seed": 2**63 - 1, "record": 1, "start": 2**31 - 1}
"""The fields of a label, `das_` before them in `extra_args`, and their largest
values.
"""

_AHEAD = "das_ahead"
"""In `extra_args` of a host's requests alone: JSON has no bytes."""


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
    def of(cls, extra_args: Mapping[str, Any] | None) -> Label:
        """Read a request's `extra_args`, which a stranger may have written; what they
        don't say has its default.

        Raises:
            BadLabel: a value is no integer, or out of range, or no field of a label has
                this name.
        """
        given = extra_args or {}
        for key in given:
            if (
                key.startswith("das_")
                and key != _AHEAD
                and key.removeprefix("das_") not in _MOST
            ):
                raise BadLabel(
                    f"{key:.100}: unknown key, allowed:"
                    f" {', '.join(f'das_{name}' for name in _MOST)}"
                )
        found = {
            name: _integer(name, given[f"das_{name}"])
            for name in _MOST
            if f"das_{name}" in given
        }
        ahead = given.get(_AHEAD)
        if not isinstance(ahead, bytes | None):
            raise BadLabel(f"{_AHEAD}: found {ahead!r:.100}, allowed: bytes")
        record = bool(found.get("record", True))
        return cls(
            found.get("problem"), found.get("seed"), record, found.get("start"), ahead
        )

    def extra_args(self) -> dict[str, int | bytes]:
        """Return the entries of `extra_args` that `of` reads back."""
        found: dict[str, int | bytes] = (
            {} if self.ahead is None else {_AHEAD: self.ahead}
        )
        return found | {
            f"das_{name}": int(value)
            for name in _MOST
            if (value := getattr(self, name)) is not None
        }

    def put_into(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return sampling parameters with this label in their `extra_args`."""
        return {
            **params,
            "extra_args": {**(params.get("extra_args") or {}), **self.extra_args()},
        }

    def problem_of(self, prompt_ids: npt.ArrayLike, media: Sequence[str] = ()) -> int:
        """Return the problem that a request with this prompt is about; `media`: hashes
        of the prompt's images.
        """
        return (
            prompt_identity(prompt_ids, *media)
            if self.problem is None
            else self.problem
        )

    def start_in(self, prompt_tokens: int) -> int:
        """Return `start` for a prompt of so many tokens."""
        return prompt_tokens if self.start is None else min(self.start, prompt_tokens)


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
        """`source`: tells labellers apart that count the same problems independently,
        such as those of two HTTP servers; `resumed`: training step from which the run
        resumes, what was drawn before is not drawn again; `joins_turns`: whether a
        prompt that begins with an earlier one belongs to that one's problem; `guesses`:
        whether what `validate` says of a prompt is only that a validation goes on: a
        later turn is one's if its first turn was.
        """
        self._run_seed = run_seed
        self._resumed = resumed
        self._source = source
        self._first_turns = FirstTurns() if joins_turns else None
        self._drawn = Counter[tuple[int, bool]]()
        self._later = Counter[tuple[int, bool]]()
        self._guesses = guesses
        self._validated = set[int]()
        """Problems whose latest first turn was a validation's, where that is
        guessed.
        """
        self._counts = 0
        """How often counting began anew."""

    @property
    def turns(self) -> bool:
        """Whether there have been prompts of later turns."""
        return bool(self._later)

    def copy(self) -> Labeller:
        """Return one that labels the requests that come next as this one would, and
        changes nothing here.
        """
        other = copy.copy(self)
        other._drawn = self._drawn.copy()
        other._later = self._later.copy()
        other._validated = self._validated.copy()
        other._first_turns = self._first_turns and self._first_turns.copy()
        return other

    def label(self, prompt: Any, validate: bool, media: Sequence[str] = ()) -> Label:
        """Label a request with a prompt (token ids without padding, and the hashes of
        its images, sound and video); `validate`: its text must stay out of the
        history.
        """
        ids = np.asarray(prompt, dtype=np.int32)
        turns = self._first_turns
        # not the problem: its samples' later turns come in any order
        asked = prompt_identity(ids, *media)
        problem = turns.problem(ids, media) if turns else asked
        if self._guesses and asked == problem:
            (self._validated.add if validate else self._validated.discard)(problem)
        elif self._guesses:
            validate = problem in self._validated
        drawn = self._drawn if asked == problem else self._later
        number = drawn[asked, validate]
        drawn[asked, validate] += 1
        row = f"{self._source}/{self._counts}/{'validation' if validate else ''}"
        seed = request_seed(self._run_seed, asked, self._resumed, number, row)
        if len(self._drawn) >= self.COUNTED:
            self._drawn.clear()
            self._counts += 1
        if len(self._later) > self.COUNTED:
            del self._later[next(iter(self._later))]
        return Label(problem, seed, record=not validate)


def _integer(name: str, value: Any) -> int:
    """Return a value of a label; JSON may carry a large integer as text."""
    try:
        found = operator.index(int(value) if isinstance(value, str) else value)
    except (TypeError, ValueError):
        found = -1
    if not 0 <= found <= _MOST[name]:
        raise BadLabel(
            f"das_{name}: found {value!r:.100}, allowed: an integer from 0 to"
            f" {_MOST[name]}"
        )
    return found
