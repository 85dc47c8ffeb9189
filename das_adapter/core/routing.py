"""Which replica a request goes to, and which requests start first, by their predicted lengths (DAS, section 4.2).

veRL's requests come one by one (`Spread`), NeMo-RL's as a batch (`longest_first`) or one by one (`least_loaded`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def longest_first(problems: Sequence[int], lengths: Mapping[int, float], workers: int) -> list[list[int]]:
    """Distribute a batch over workers by expected work (longest processing time first; DAS, section 4.2).

    A problem's samples stay on one worker, where they draft from each other, unless there are fewer than two problems
    per worker.

    Args:
        problems: the problem of each row.
        lengths: expected response length of known problems, in tokens; others count as the mean of the known.
        workers: number of data-parallel workers.

    Returns:
        For each worker its rows, longest first; every row is in exactly one list.
    """
    default = sum(lengths.values()) / len(lengths) if lengths else 1.0
    groups: dict[int, list[int]] = {}
    for row, problem in enumerate(problems):
        groups.setdefault(problem, []).append(row)
    whole = len(groups) >= 2 * workers
    units = [(problem, rows) for problem, rows in groups.items()] if whole else [
        (problem, [row]) for problem, rows in groups.items() for row in rows
    ]  # fmt: skip
    units.sort(key=lambda unit: -lengths.get(unit[0], default) * len(unit[1]))
    plan: list[list[int]] = [[] for _ in range(workers)]
    load = [0.0] * workers
    for problem, rows in units:
        lightest = load.index(min(load))
        plan[lightest] += rows
        load[lightest] += lengths.get(problem, default) * len(rows)
    return [sorted(rows, key=lambda row: -lengths.get(problems[row], default)) for rows in plan]


def least_loaded(load: Sequence[float], home: int | None) -> int:
    """Choose the worker for one request of an asynchronous run.

    Args:
        load: expected tokens in flight of each worker.
        home: the worker that has the problem's other samples, if any; it is taken where it ties for the least load.
    """
    least = min(load)
    return home if home is not None and load[home] == least else list(load).index(least)


class Spread:
    """Replicas and the predicted tokens that they still have to write; a request goes where it delays the end least.

    A replica's step time grows little with its batch, so its rollout ends with its longest requests: the number of long
    requests is balanced first, then the tokens. Requests of a problem need not stay together, because the history is
    shared.
    """

    def __init__(self, replicas: Iterable[str] = ()) -> None:
        self._tokens: dict[str, float] = dict.fromkeys(replicas, 0.0)
        self._long: dict[str, int] = dict.fromkeys(self._tokens, 0)

    def add(self, replica: str) -> None:
        """Add a replica that joined."""
        self._tokens.setdefault(replica, 0.0)
        self._long.setdefault(replica, 0)

    def remove(self, replica: str) -> None:
        """Remove a replica that left."""
        self._tokens.pop(replica, None)
        self._long.pop(replica, None)

    def pick(self, length: float, long: bool) -> str:
        """Choose a replica for a request of a predicted length, and count it there. There must be a replica."""
        best = min(self._tokens, key=lambda r: (self._long[r] if long else 0, self._tokens[r]))
        self._tokens[best] += length
        self._long[best] += long
        return best

    def done(self, replica: str, length: float, long: bool) -> None:
        """Take off a request that ended, with the figures with which its replica was picked."""
        if replica in self._tokens:
            self._tokens[replica] = max(0.0, self._tokens[replica] - length)
            self._long[replica] -= long
