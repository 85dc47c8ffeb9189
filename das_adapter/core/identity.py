"""The identity of a problem, and the seeds of the requests about it."""

from __future__ import annotations

import hashlib
import operator
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def request_seed(
    run_seed: int, problem: int, step: int, sample: int, row: str | int = 0
) -> int:
    """Compute the seed of one request: the same in every run that draws this sample of
    this problem in this step, and another for every other request of the run. It is the
    only place where seeds are made.

    Args:
        run_seed: `verify.seed` of the run.
        problem: see `prompt_identity`.
        step: training step (weight version) the rollout belongs to.
        sample: index of the sample within its group; turns of a conversation differ by
            position, not by seed.
        row: what tells apart requests that agree in all of this: rows of a batch with
            one prompt, or front ends that count requests independently.

    Returns:
        An integer in [0, 2^63).
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{run_seed}/{problem}/{step}/{sample}/{row}".encode())
    return _number(digest) >> 1


def prompt_identity(prompt_ids: npt.ArrayLike, *beside: str | int) -> int:
    """Return the 64-bit identity of a problem: a hash of its first prompt's ids, equal
    in every epoch, run and host. `beside`: what there is to the problem beside these
    ids: the hashes of its images, or its row in the data set.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update(np.ascontiguousarray(np.asarray(prompt_ids, dtype="<i4")).tobytes())
    for part in beside:
        digest.update(f"/{part}".encode())
    return _number(digest)


def media_hash(
    item: Any, of_values: Callable[[npt.NDArray[Any]], str] | None = None
) -> str:
    """Return the hash of an image, a sound or a video: of the values, where NumPy can
    read them, also those of its parts, such as a tensor of frames and what is said of
    them. `of_values`: what hashes values; None: `values_hash`.
    """
    # parts of several shapes, or values of a type that NumPy lacks
    try:
        values = np.asarray(item)
    except (
        TypeError,
        ValueError,
    ):
        values = np.empty(0, dtype=object)
    if not values.dtype.hasobject:
        return (of_values or values_hash)(values)
    digest = hashlib.blake2b(digest_size=8)
    if isinstance(item, Mapping | list | tuple):
        parts = item.items() if isinstance(item, Mapping) else item
        digest.update(repr([media_hash(part, of_values) for part in parts]).encode())
    else:
        digest.update(pickle.dumps(item))
    return digest.hexdigest()


def values_hash(values: npt.NDArray[Any]) -> str:
    """Return the hash of an array's values, type and shape."""
    digest = hashlib.blake2b(
        f"{values.dtype.str}{values.shape}".encode(), digest_size=8
    )
    digest.update(values.tobytes())
    return digest.hexdigest()


class MediaHashes:
    """Hashes the images, sound and video of rows. Samples of a problem follow each
    other, with the same ones or with copies: to compare these with those of the row
    before takes a fraction of the time.
    """

    def __init__(self) -> None:
        self._before: tuple[
            Sequence[Any], list[tuple[npt.NDArray[Any], str]], list[str]
        ] = ([], [], [])
        """Of the row before: its items, their values in order, each with its hash, and
        what was returned.
        """

    def hash_row(self, items: Sequence[Any]) -> list[str]:
        """Return the hashes of a row's items, as `media_hash` does."""
        before, values_before, hashes = self._before
        if len(items) == len(before) and all(map(operator.is_, items, before)):
            return hashes
        rest = iter(values_before)
        seen = list[tuple[npt.NDArray[Any], str]]()

        def of_values(values: npt.NDArray[Any]) -> str:
            known, found = next(rest, (None, ""))
            if (
                known is None
                or known.dtype != values.dtype
                or not np.array_equal(known, values)
            ):
                found = values_hash(values)
            seen.append((values, found))
            return found

        hashes = [media_hash(item, of_values) for item in items]
        self._before = items, seen, hashes
        return hashes


class FirstTurns:
    """Finds the problem of a prompt: the prompt it began with, if that was asked
    before, else the prompt itself.
    """

    def __init__(self, remembered: int = 4096):
        self._remembered = remembered
        self._known: dict[int, tuple[int, int, int]] = {}
        """Of the prompts that were asked, the latest last: their tokens, images, and
        sum of weighted tokens.
        """

    def copy(self) -> FirstTurns:
        """Return one that knows the same prompts, and hears of others by itself."""
        other = FirstTurns(self._remembered)
        other._known = self._known.copy()
        return other

    def problem(self, prompt: npt.NDArray[np.int32], media: Sequence[str] = ()) -> int:
        """Return the 64-bit identity of the conversation's first prompt. In later turns
        the prompt, int32 [tokens], and the hashes of its images begin with those of the
        first turn.
        """
        identity = prompt_identity(prompt, *media)
        if identity not in self._known:
            # Equal beginnings have equal sums; one hash for every length that is known
            # would take milliseconds.
            weights = np.cumprod(np.full(len(prompt), 6364136223846793005, np.uint64))
            sums = np.cumsum(prompt.astype(np.uint64) * weights).tolist()
            identity = self._prefix(prompt, media, sums) or identity
            self._known.setdefault(
                identity, (len(prompt), len(media), sums[-1] if sums else 0)
            )
        self._known[identity] = self._known.pop(identity)
        if len(self._known) > self._remembered:
            del self._known[next(iter(self._known))]
        return identity

    def _prefix(
        self, prompt: npt.NDArray[np.int32], media: Sequence[str], sums: Sequence[int]
    ) -> int | None:
        """The shortest known prompt that this one begins with."""
        likely = [
            (tokens, -images, identity)
            for identity, (tokens, images, total) in self._known.items()
            if tokens < len(prompt)
            and total == sums[tokens - 1]
            and images <= len(media)
        ]
        for tokens, fewer, identity in sorted(likely):
            if prompt_identity(prompt[:tokens], *media[:-fewer]) == identity:
                return identity
        return None


def _number(digest: hashlib.blake2b) -> int:
    return int.from_bytes(digest.digest(), "little")
