"""Who asks: the problem behind a prompt, and the seed of each of its samples.

NeMo-RL hands its generation nothing but token ids, so the first turn's prompt is a problem's identity.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

from das_adapter.core.noise import prompt_identity, request_seed
from das_adapter.protocol.engine_args import PROBLEM_ARG, RECORD_ARG, SEED_ARG

Label = dict[str, int]
"""The entries of `SamplingParams.extra_args` that tell the engine who asks."""

LABELS = "das_labels"
"""Key of a NeMo-RL generation batch: the label of each row."""


class FirstTurns:
    """Finds the problem of a prompt: the prompt it began with, if that was asked before, else the prompt itself."""

    def __init__(self, remembered: int = 4096):
        self._remembered = remembered
        self._known: OrderedDict[int, int] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def problem(self, prompt: npt.NDArray[np.int32]) -> int:
        """64-bit identity of the conversation's first prompt.

        Args:
            prompt: int32 [tokens]; in later turns it begins with the first turn's prompt.
        """
        identity = prompt_identity(prompt)
        if identity not in self._known:
            identity = self._prefix(prompt) or identity
        if identity in self._known:
            self._known.move_to_end(identity)
        else:
            self._remember(identity, len(prompt))
        return identity

    def _prefix(self, prompt: npt.NDArray[np.int32]) -> int | None:
        """The shortest known prompt that this one begins with."""
        digest, begin = hashlib.blake2b(digest_size=8), 0
        text = np.ascontiguousarray(prompt, dtype="<i4")
        for length in sorted(n for n in self._lengths if n < len(text)):
            digest.update(text[begin:length].tobytes())
            begin = length
            identity = int.from_bytes(digest.copy().digest(), "little")
            if self._known.get(identity) == length:
                return identity
        return None

    def _remember(self, identity: int, length: int) -> None:
        self._known[identity] = length
        self._lengths[length] += 1
        if len(self._known) > self._remembered:
            _, forgotten = self._known.popitem(last=False)
            self._lengths[forgotten] -= 1
            if not self._lengths[forgotten]:
                del self._lengths[forgotten]


class Labeller:
    """Labels requests. The n-th request of a problem gets the same seed in every run that asks in the same order."""

    def __init__(self, run_seed: int, source: int = 0):
        """
        Args:
            run_seed: `verify.seed`.
            source: tells labellers apart that count the same problems independently (HTTP servers of two workers).
        """
        self._run_seed = run_seed
        self._source = source
        self._first_turns = FirstTurns()
        self._drawn: Counter[tuple[int, bool]] = Counter()

    def label(self, prompt: Any, validate: bool) -> Label:
        """The label of a request.

        Args:
            prompt: token ids, without padding.
            validate: whether its text must stay out of the history.
        """
        problem = self._first_turns.problem(np.asarray(prompt, dtype=np.int32))
        number = self._drawn[problem, validate]
        self._drawn[problem, validate] += 1
        seed = request_seed(self._run_seed, problem, 0, -1 - number if validate else number, self._source)
        return {PROBLEM_ARG: problem, SEED_ARG: seed, RECORD_ARG: int(not validate)}
