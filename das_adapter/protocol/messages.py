"""What a host and an engine tell each other. Payloads are plain containers, as vLLM's
remote calls carry them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt
from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass
from pydantic_core import to_jsonable_python

from das_adapter.core.length import RESPONSE, Responses


class Trajectory(NamedTuple):
    """A finished response."""

    problem: int
    """64-bit identity of the problem."""
    tokens: bytes
    """int32 token ids, the prompt excluded."""
    version: int
    """Weight version that wrote it."""


Payload = dict[str, Any]
"""Arguments of a command, plain containers."""


def responses(trajectories: Iterable[Trajectory]) -> Responses:
    """Return how long some trajectories are."""
    rows = []
    for problem, text, version in trajectories:
        num_tokens = len(text) // _TOKEN_BYTES
        row = (problem, num_tokens, version)
        rows.append(row)
    return np.array(rows, RESPONSE)


def to_plain_payload(value: Any) -> Any:
    """Return a payload with Python's own numbers and lists in the place of NumPy's,
    which vLLM's transport refuses.
    """
    return to_jsonable_python(value, fallback=_to_list)


def _to_list(numbers: npt.NDArray[Any]) -> Any:
    return numbers.tolist()


_TOKEN_BYTES = 4
_COUNT_BYTES = 8
_ROW = np.dtype(
    [
        ("problem", "<u8"),
        ("bytes", "<u8"),
        ("version", "<i8"),
    ]
)
"""What `pack` writes of each trajectory before the texts. Of two trajectories, with
texts of 8 and 4 bytes, it writes

    2 | problem 8 version | problem 4 version | text text | text

where the count takes 8 bytes and each row 24.
"""


def pack(trajectories: Sequence[Trajectory]) -> bytes:
    """Return trajectories as bytes: their number, a row for each, then their texts."""
    rows = np.empty(len(trajectories), _ROW)
    texts = []
    for number, trajectory in enumerate(trajectories):
        problem, text, version = trajectory
        num_bytes = len(text)
        rows[number] = (problem, num_bytes, version)
        texts.append(text)
    count = np.uint64(len(rows))
    parts = [
        count.tobytes(),
        rows.tobytes(),
        *texts,
    ]
    return b"".join(parts)


def unpack(content: bytes) -> list[Trajectory]:
    """Return what was packed; ValueError: the bytes are no trajectories."""
    num_bytes = len(content)
    row_bytes = _ROW.itemsize
    first = np.frombuffer(content, np.uint64, 1)
    count = int(first[0])
    if count > num_bytes // row_bytes:
        raise ValueError(
            f"found {num_bytes} bytes of trajectories, expected {count} rows of"
            f" {row_bytes}"
        )
    rows = np.frombuffer(content, _ROW, count, offset=_COUNT_BYTES)
    begin = _COUNT_BYTES + rows.nbytes
    text_bytes = rows["bytes"].tolist()
    expected_bytes = begin + sum(text_bytes)
    if count and expected_bytes != num_bytes:
        raise ValueError(
            f"found {num_bytes} bytes of trajectories, expected {expected_bytes}"
        )
    trajectories = []
    for problem, text_length, version in rows.tolist():
        end = begin + text_length
        text = content[begin:end]
        trajectory = Trajectory(problem, text, version)
        trajectories.append(trajectory)
        begin = end
    return trajectories


class Published(NamedTuple):
    """A history that a node's service has published."""

    directory: str
    generation: int


@dataclass(frozen=True)
class Refresh:
    """The message to an engine at a weight sync (command `refresh`)."""

    version: Annotated[int, Field(ge=-(2**31), lt=2**31)]
    """Weight version from now on."""
    history: Published | None = None
    """The history to map; None: what is mapped stays."""
    lengths: bytes = b""
    """Lengths of the responses since the last refresh: the bytes of `RESPONSE` rows."""

    @property
    def responses(self) -> Responses:
        """`lengths` as an array, [n] of `RESPONSE`."""
        return np.frombuffer(self.lengths, RESPONSE)

    def payload(self) -> Payload:
        """Return the fields that are not at their default, of which
        `Refresh(**payload)` makes the same message.
        """
        adapter = TypeAdapter(Refresh)
        fields: Payload = adapter.dump_python(self, exclude_defaults=True)
        return fields


class Refreshed(TypedDict, total=False):
    """The answer of one rank of an engine to a refresh."""

    generation: int
    """Number of the generation of the history that is mapped, 0: none. Missing where
    another rank of the engine has the history.
    """
    error: str
    """What went wrong; the rank goes on without drafts."""


async def call_workers(
    engine: Any,
    command: str,
    payload: Payload,
) -> list[list[Any]]:
    """Run a command in every worker of vLLM's `AsyncLLM`.

    Its own `collective_rpc` calls all data-parallel engines too, but returns the
    answers of the first engine's workers alone.

    Returns:
        The answers of each data-parallel engine's ranks.
    """
    arguments = (command, payload)
    core: Any = getattr(engine, "engine_core", None)
    engines = getattr(core, "core_engines", ())
    if len(engines) < 2:
        answers = await engine.collective_rpc("das_rpc", args=arguments)
        return [answers]
    calls = []
    for one_engine in engines:
        call = core._call_utility_async(
            "collective_rpc",
            "das_rpc",
            None,
            arguments,
            None,
            engine=one_engine,
        )
        calls.append(call)
    answers_of_engines = await asyncio.gather(*calls)
    return list(answers_of_engines)
