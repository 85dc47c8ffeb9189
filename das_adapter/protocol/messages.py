"""What a host and an engine tell each other. Payloads are plain containers, as vLLM's
remote calls carry them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple, TypedDict

import numpy as np
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


def responses(trajectories: Iterable[Trajectory]) -> Responses:
    """Return how long some trajectories are."""
    return np.array(
        [(t.problem, len(t.tokens) // 4, t.version) for t in trajectories], RESPONSE
    )


def plain(value: Any) -> Any:
    """Return a payload with Python's own numbers and lists in the place of NumPy's,
    which vLLM's transport refuses.
    """
    return to_jsonable_python(value, fallback=lambda numbers: numbers.tolist())


_ROW = np.dtype([("problem", "<u8"), ("bytes", "<u8"), ("version", "<i8")])


def pack(trajectories: Sequence[Trajectory]) -> bytes:
    """Return trajectories as bytes: their number, a row for each, then their texts."""
    rows = np.array([(t.problem, len(t.tokens), t.version) for t in trajectories], _ROW)
    return b"".join(
        [
            np.uint64(len(rows)).tobytes(),
            rows.tobytes(),
            *(t.tokens for t in trajectories),
        ]
    )


def unpack(content: bytes) -> list[Trajectory]:
    """Return what was packed; ValueError: the bytes are no trajectories."""
    count = int(np.frombuffer(content, np.uint64, 1)[0])
    if count > len(content) // _ROW.itemsize:
        raise ValueError(
            f"found {len(content)} bytes of trajectories, expected {count} rows of"
            f" {_ROW.itemsize}"
        )
    rows = np.frombuffer(content, _ROW, count, offset=8)
    ends = 8 + rows.nbytes + np.cumsum(rows["bytes"])
    if count and ends[-1] != len(content):
        raise ValueError(
            f"found {len(content)} bytes of trajectories, expected {ends[-1]}"
        )
    return [
        Trajectory(problem, content[end - size : end], version)
        for (problem, size, version), end in zip(
            rows.tolist(), ends.tolist(), strict=True
        )
    ]


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
    """What to map; None: what is mapped stays."""
    lengths: bytes = b""
    """Of responses since the last refresh: the bytes of `RESPONSE` rows."""

    @property
    def responses(self) -> Responses:
        """Lengths of all responses that are new to the engine."""
        return np.frombuffer(self.lengths, RESPONSE)

    def payload(self) -> dict[str, Any]:
        """Return the fields that are not at their default, of which
        `Refresh(**payload)` makes the same message.
        """
        return TypeAdapter(Refresh).dump_python(self, exclude_defaults=True)


class Refreshed(TypedDict, total=False):
    """The answer of one rank of an engine to a refresh."""

    generation: int
    """Of the history that is mapped, 0: none. Missing where another rank of the engine
    has the history.
    """
    error: str
    """What went wrong; the rank goes on without drafts."""


async def call_workers(
    engine: Any, command: str, payload: dict[str, Any]
) -> list[list[Any]]:
    """Run a command in every worker of vLLM's `AsyncLLM`; return the answers of each
    data-parallel engine's ranks. Its own `collective_rpc` calls all of them too, and
    returns the answers of the first engine's alone.
    """
    core: Any = getattr(engine, "engine_core", None)
    if len(engines := getattr(core, "core_engines", ())) < 2:
        return [await engine.collective_rpc("das_rpc", args=(command, payload))]
    call = ("collective_rpc", "das_rpc", None, (command, payload), None)
    calls = (core._call_utility_async(*call, engine=one) for one in engines)
    return list(await asyncio.gather(*calls))
