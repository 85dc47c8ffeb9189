"""The identity of a problem, and the seeds of the requests about it."""

from __future__ import annotations

import hashlib
import operator
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[Any]
HashValues = Callable[[Values], str]
TokenIds = npt.NDArray[np.int32]
_FACTOR = 6364136223846793005
"""The weight of a token in the sums of prompts, over that of the token before it."""


def request_seed(
    run_seed: int,
    problem: int,
    step: int,
    sample: int,
    row: str | int = 0,
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
    parts = (run_seed, problem, step, sample, row)
    request = "/".join(map(str, parts))
    digest = hashlib.blake2b(digest_size=8)
    digest.update(request.encode())
    number = _number(digest)
    return number >> 1


def prompt_identity(prompt_ids: npt.ArrayLike, *beside: str | int) -> int:
    """Return the 64-bit identity of a problem: a hash of its first prompt's ids, equal
    in every epoch, run and host. `beside`: what there is to the problem beside these
    ids: the hashes of its images, or its row in the data set.
    """
    digest = hashlib.blake2b(digest_size=8)
    ids = np.asarray(prompt_ids, dtype="<i4")
    ids = np.ascontiguousarray(ids)
    digest.update(ids.tobytes())
    for part in beside:
        text = f"/{part}"
        digest.update(text.encode())
    return _number(digest)


def values_hash(values: Values) -> str:
    """Return the hash of an array's values, type and shape."""
    form = f"{values.dtype.str}{values.shape}"
    digest = hashlib.blake2b(digest_size=8)
    digest.update(form.encode())
    digest.update(values.tobytes())
    return digest.hexdigest()


def media_hash(item: Any, hash_values: HashValues = values_hash) -> str:
    """Return the hash of an image, a sound or a video: of the values, where NumPy can
    read them, also those of its parts, such as a tensor of frames and what is said of
    them. `hash_values`: what hashes values.
    """
    try:
        values = np.asarray(item)
    except (TypeError, ValueError):
        # parts of several shapes, or values of a type that NumPy lacks
        values = np.empty(0, dtype=object)
    if not values.dtype.hasobject:
        return hash_values(values)
    digest = hashlib.blake2b(digest_size=8)
    parts = item
    if isinstance(item, Mapping):
        parts = list(item.items())
    if not isinstance(parts, list | tuple):
        content = pickle.dumps(item)
        digest.update(content)
        return digest.hexdigest()
    hashes = [media_hash(part, hash_values) for part in parts]
    text = repr(hashes)
    digest.update(text.encode())
    return digest.hexdigest()


class HashedValues(NamedTuple):
    """An array that was hashed."""

    values: Values
    hash: str


class _HashedRow(NamedTuple):
    """A row of a batch whose media were hashed."""

    items: Sequence[Any]
    values: Sequence[HashedValues]
    """Arrays of the items, in the order in which they were hashed."""
    hashes: list[str]
    """Hashes of the items."""


class MediaHashes:
    """Hashes the images, sound and video of rows. Samples of a problem follow each
    other, with the same ones or with copies: to compare these with those of the row
    before takes a fraction of the time.
    """

    def __init__(self) -> None:
        self._before = _HashedRow((), [], [])

    def hash_row(self, items: Sequence[Any]) -> list[str]:
        """Return the hashes of a row's items, as `media_hash` does."""
        before = self._before
        if _are_same(items, before.items):
            return before.hashes
        values_before = iter(before.values)
        hashed: list[HashedValues] = []

        def hash_values(values: Values) -> str:
            known = next(values_before, None)
            if known is not None and _equal(known.values, values):
                digest = known.hash
            else:
                digest = values_hash(values)
            hashed.append(HashedValues(values, digest))
            return digest

        hashes = [media_hash(item, hash_values) for item in items]
        self._before = _HashedRow(items, hashed, hashes)
        return hashes


def _are_same(items: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether two rows have the same objects as items."""
    if len(items) != len(others):
        return False
    same = map(operator.is_, items, others)
    return all(same)


def _equal(one: Values, other: Values) -> bool:
    """Return whether two arrays agree in type and values."""
    if one.dtype != other.dtype:
        return False
    return np.array_equal(one, other)


class _Prompt(NamedTuple):
    """A prompt that was asked."""

    tokens: int
    images: int
    weighted_sum: int
    """Sum of its tokens, each times the weight of its place, modulo 2^64."""


class FirstTurns:
    """Finds the problem of a prompt: the prompt it began with, if that was asked
    before, else the prompt itself.
    """

    def __init__(self, remembered: int = 4096):
        self._remembered = remembered
        self._known: dict[int, _Prompt] = {}
        """Prompts that were asked, by identity, the latest last."""

    def copy(self) -> FirstTurns:
        """Return another one that knows the same prompts, and learns others itself."""
        other = FirstTurns(self._remembered)
        other._known = self._known.copy()
        return other

    def problem(self, prompt: TokenIds, media: Sequence[str] = ()) -> int:
        """Return the 64-bit identity of the conversation's first prompt. In later turns
        the prompt, int32 [tokens], and the hashes of its images begin with those of the
        first turn.
        """
        identity = prompt_identity(prompt, *media)
        if identity not in self._known:
            # Equal beginnings have equal sums; one hash for every length that is known
            # would take milliseconds.
            sums = _weighted_sums(prompt)
            first_turn = self._first_turn(prompt, media, sums)
            identity = first_turn or identity
            whole_sum = sums[-1] if sums else 0
            asked = _Prompt(
                tokens=len(prompt),
                images=len(media),
                weighted_sum=whole_sum,
            )
            self._known.setdefault(identity, asked)
        latest = self._known.pop(identity)
        self._known[identity] = latest
        if len(self._known) > self._remembered:
            oldest = next(iter(self._known))
            del self._known[oldest]
        return identity

    def _first_turn(
        self,
        prompt: TokenIds,
        media: Sequence[str],
        sums: Sequence[int],
    ) -> int | None:
        """Return the identity of the shortest known prompt that this one begins with,
        of equally long ones that with most images; None: there is none.
        """
        likely = []
        for identity, known in self._known.items():
            is_shorter = known.tokens < len(prompt)
            if not is_shorter or known.images > len(media):
                continue
            last = known.tokens - 1
            if known.weighted_sum != sums[last]:
                continue
            order = (known.tokens, -known.images, identity)
            likely.append(order)
        likely.sort()
        for num_tokens, minus_images, identity in likely:
            tokens = prompt[:num_tokens]
            images = media[:-minus_images]
            if prompt_identity(tokens, *images) == identity:
                return identity
        return None


def _weighted_sums(tokens: TokenIds) -> list[int]:
    """Return the weighted sum of the first n tokens, for each n from 1."""
    factors = np.full(len(tokens), _FACTOR, np.uint64)
    weights = np.cumprod(factors)
    values = tokens.astype(np.uint64)
    weighted = values * weights
    sums = np.cumsum(weighted)
    numbers: list[int] = sums.tolist()
    return numbers


def _number(digest: hashlib.blake2b) -> int:
    """Return the digest as an integer."""
    content = digest.digest()
    return int.from_bytes(content, "little")
