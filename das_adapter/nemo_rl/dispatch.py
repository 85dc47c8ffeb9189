"""Longest first: which rows of a batch go to which data-parallel worker, and in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def longest_first(problems: Sequence[int], lengths: Mapping[int, float], workers: int) -> list[list[int]]:
    """Share a batch out by expected work (longest processing time first; DAS, section 4.2).

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
    """The worker for one request of an asynchronous run.

    Args:
        load: expected tokens in flight of each worker.
        home: the worker that has the problem's other samples, if any; it is taken where it ties for the least load.
    """
    least = min(load)
    return home if home is not None and load[home] == least else list(load).index(least)
