"""The identity of a problem, and the seeds of the requests about it."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict

import numpy as np
import numpy.typing as npt


def request_seed(run_seed: int, problem: int, step: int, sample: int, row: int = 0) -> int:
    """Compute the seed of one request: the same in every run that draws this sample of this problem in this step.

    Args:
        run_seed: `verify.seed` of the run.
        problem: 64-bit identity of the problem (`prompt_identity`).
        step: training step (weight version) the rollout belongs to.
        sample: index of the sample within its group; turns of a conversation differ by position, not by seed.
        row: index of the prompt in the data set: two rows with the same prompt draw different samples.

    Returns:
        An integer in [0, 2^63).
    """
    digest = _hash()
    digest.update(f"{run_seed}/{problem}/{step}/{sample}/{row}".encode())
    return _number(digest) >> 1


def prompt_identity(prompt_ids: npt.ArrayLike, row: int | None = None) -> int:
    """Return the 64-bit identity of a problem: a hash of its first prompt's ids, equal in every epoch, run and host.
    `row`: of the data set, where there is more to the problem than these ids (images, say); None: there is not."""
    digest = _hash()
    digest.update(_text(prompt_ids))
    if row is not None:
        digest.update(f"/{row}".encode())
    return _number(digest)


class FirstTurns:
    """Finds the problem of a prompt: the prompt it began with, if that was asked before, else the prompt itself."""

    def __init__(self, remembered: int = 4096):
        self._remembered = remembered
        self._known: OrderedDict[int, int] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def problem(self, prompt: npt.NDArray[np.int32]) -> int:
        """Return the 64-bit identity of the conversation's first prompt.

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
        digest, begin = _hash(), 0
        for length in sorted(n for n in self._lengths if n < len(prompt)):
            digest.update(_text(prompt[begin:length]))
            begin = length
            identity = _number(digest)
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


def _hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=8)


def _number(digest: hashlib.blake2b) -> int:
    return int.from_bytes(digest.digest(), "little")


def _text(ids: npt.ArrayLike) -> bytes:
    return np.ascontiguousarray(np.asarray(ids, dtype="<i4")).tobytes()
