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
    prompt: bytes = b""
    """int32 token ids of the prompt, where somebody has not seen them yet."""


Payload = dict[str, Any]
"""Arguments of a command, plain containers."""


def responses(trajectories: Iterable[Trajectory]) -> Responses:
    """Return how long some trajectories are."""
    rows = []
    for trajectory in trajectories:
        num_tokens = len(trajectory.tokens) // _TOKEN_BYTES
        row = (trajectory.problem, num_tokens, trajectory.version)
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
        ("prompt_bytes", "<u8"),
    ]
)
"""What `pack` writes of each trajectory before the texts. Of two trajectories, with
texts of 8 and 4 bytes, the first with a prompt of 4, it writes

    2 | problem 8 version 4 | problem 4 version 0 | text text prompt | text

where the count takes 8 bytes and each row 32.
"""


def pack(trajectories: Sequence[Trajectory]) -> bytes:
    """Return trajectories as bytes: their number, a row for each, then their texts."""
    rows = np.empty(len(trajectories), _ROW)
    texts = []
    for number, trajectory in enumerate(trajectories):
        problem, text, version, prompt = trajectory
        rows[number] = (problem, len(text), version, len(prompt))
        texts += [text, prompt]
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
    prompt_bytes = rows["prompt_bytes"].tolist()
    expected_bytes = begin + sum(text_bytes) + sum(prompt_bytes)
    if count and expected_bytes != num_bytes:
        raise ValueError(
            f"found {num_bytes} bytes of trajectories, expected {expected_bytes}"
        )
    trajectories = []
    for problem, text_length, version, prompt_length in rows.tolist():
        text_end = begin + text_length
        end = text_end + prompt_length
        text = content[begin:text_end]
        prompt = content[text_end:end]
        trajectory = Trajectory(problem, text, version, prompt)
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
