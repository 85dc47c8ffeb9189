"""What the suffix index costs and what it drafts, beside ArcticInference's in the same
run.

python benchmarks/index.py --traces DIR --out FILE.json
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from index_drafters import ENGINES, Arctic, Ours
from index_workload import SETTINGS, Group, batches, groups
from provenance import provenance, save

from das_adapter.core.index import SuffixIndex
from das_adapter.core.index.store import HistoryStore
from das_adapter.errors import DasError
from das_adapter.sim import rollouts as dumps
from das_adapter.sim.rollouts import RecordedResponse

BATCHES = (1, 16, 64, 256)
Log = Callable[[str], None]


def accepted(
    engine: Ours | Arctic,
    found: Sequence[Group],
    setting: str,
    budget: int,
    at_once: int = 64,
) -> dict[str, float]:
    """Write each group's target again, and count the draft tokens that are right.

    Args:
        setting: what it drafts from besides its own text and prompt: siblings that are
            as long as it is now (`growing`) or `finished`, and rollouts of the same
            prompt by `earlier` policies.
        at_once: groups written together.

    Returns:
        Per round (one forward pass): `accepted` draft tokens, `drafted` ones;
        `tokens_per_forward`, `rounds`, and `seconds` of everything.
    """
    rounds = right = drafted = tokens = 0
    begin = time.perf_counter()
    for batch in batches(found, at_once):
        for g in batch:
            texts = g.earlier if setting.startswith("earlier") else []
            texts = (
                texts + [(1 << 20, s) for s in g.siblings]
                if setting.endswith("finished")
                else texts
            )
            engine.learn(g.problem, g.prompt, texts)
        engine.seal()
        growing = setting.endswith("growing")
        live = [
            (
                g,
                engine.open(g.problem, g.prompt),
                [engine.open(g.problem, g.prompt) for _ in g.siblings if growing],
            )
            for g in batch
        ]
        at = dict.fromkeys((h for _, h, _ in live), 0)
        while live:
            drafts = engine.draft([h for _, h, _ in live], budget)
            handles = []
            grown = []
            for (g, handle, siblings), draft in zip(live, drafts, strict=True):
                old = at[handle]
                wrong = np.flatnonzero(
                    g.target[old : old + len(draft)] != draft[: len(g.target) - old]
                )
                kept = (
                    int(wrong[0])
                    if len(wrong)
                    else min(len(draft), len(g.target) - old)
                )
                right = right + kept
                drafted = drafted + len(draft)
                rounds = rounds + 1
                at[handle] = old + kept + 1
                for h, text in (
                    (handle, g.target),
                    *zip(siblings, g.siblings, strict=False),
                ):
                    if old < len(text):
                        handles.append(h)
                        grown.append(text[old : old + kept + 1])
                tokens += min(kept + 1, len(g.target) - old)
            engine.extend(handles, grown)
            for g, handle, siblings in live:
                if at[handle] >= len(g.target):
                    engine.close([handle, *siblings])
            live = [x for x in live if at[x[1]] < len(x[0].target)]
    seconds = time.perf_counter() - begin
    return {
        "accepted": right / rounds,
        "drafted": drafted / rounds,
        "tokens_per_forward": tokens / rounds,
        "rounds": rounds,
        "seconds": seconds,
    }


def cost(
    engine: Ours | Arctic,
    rollouts: Sequence[RecordedResponse],
    budget: int = 8,
    steps: int = 100,
) -> dict[str, Any]:
    """Measure insert and seal speed, memory, and the time of a decode step by batch:
    each request writes three tokens a step, which are inserted, and gets a draft.

    All rollouts but the last 256 are history, in groups of 16 (four versions); the last
    ones are live and half written.
    """
    rollouts = [r for r in rollouts if len(r.tokens) >= 64]
    order = np.random.default_rng(0).permutation(len(rollouts))[: 5 * max(BATCHES)]
    history, live = (
        np.split(order, [-max(BATCHES)])
        if len(order) > max(BATCHES)
        else (order, order)
    )
    problems = max(BATCHES) // 16
    before = resident()
    begin = time.perf_counter()
    for i, r in enumerate(history):
        engine.learn(
            i % problems,
            rollouts[r].prompt[:0],
            [(i * 4 // len(history), rollouts[r].tokens)],
        )
    added = time.perf_counter()
    engine.seal()
    sealed = time.perf_counter()
    count = sum(len(rollouts[r].tokens) for r in history)
    result: dict[str, Any] = {
        "history_tokens": count,
        "insert_and_seal_tokens_per_s": count / (sealed - begin),
        "seal_s": sealed - added,
        "resident_bytes_per_token": (resident() - before) / count,
    }
    if isinstance(engine, Ours):
        result["bytes_per_token"] = engine.index.nbytes / count
    result["decode_step"] = {}
    for size in BATCHES:
        times = []
        for first in range(0, len(live), size)[:16]:
            texts = [rollouts[r].tokens for r in live[first : first + size]]
            handles = [
                engine.open(i % problems, texts[i][:0]) for i in range(len(texts))
            ]
            engine.extend(handles, [t[: len(t) // 2] for t in texts])
            at = [len(t) // 2 for t in texts]
            for _ in range(steps):
                grown = [
                    t[p : p + 3] if p < len(t) else t[:3]
                    for t, p in zip(texts, at, strict=True)
                ]
                at = [p + 3 for p in at]
                decode = engine.step(handles, grown, budget)
                start = time.perf_counter()
                decode()
                times.append(time.perf_counter() - start)
            engine.close(handles)
        result["decode_step"][size] = {
            "ms_p50": float(np.median(times) * 1e3),
            "ms_p99": float(np.percentile(times, 99) * 1e3),
            "us_per_request_p50": float(np.median(times) / size * 1e6),
            "us_per_request_p99": float(np.percentile(times, 99) / size * 1e6),
        }
    return result


def mapping(
    tokens: int = 10_000_000, problems: int = 512, versions: int = 16
) -> dict[str, Any]:
    """Measure what it costs an engine, at a weight sync, to map a node's history of
    `tokens` (milliseconds).

    `refresh_step`: one more step's file besides those it maps. `refresh_merged`: after
    all of it was merged, with no request live, and with one of every problem live (then
    all bytes are read and checked). `attach`: a fresh engine; `first_use`: it opens a
    request of every problem, which reads and checks all bytes.
    """
    rng = np.random.default_rng(0)
    size = tokens // versions // problems
    base = [rng.integers(0, 30_000, size).astype(np.int32) for _ in range(problems)]

    def timed(call: Callable[[], Any]) -> tuple[float, Any]:
        start = time.perf_counter()
        result = call()
        return (time.perf_counter() - start) * 1e3, result

    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(dir=folder) as directory,
        HistoryStore(directory) as store,
    ):

        def step(version: int) -> float:
            for problem in range(problems):
                changed = rng.random(size) < 0.1
                store.add(
                    problem,
                    np.where(changed, rng.integers(0, 30_000, size), base[problem]),
                    version,
                )
            return timed(store.seal)[0]

        def merge() -> None:
            while store.work():
                pass

        for version in range(versions - 1):
            step(version)
            merge()
        index = SuffixIndex.attach(directory)
        seal_ms = step(versions)
        refresh_step, _ = timed(index.refresh)
        merge_ms, _ = timed(merge)
        refresh_merged, _ = timed(index.refresh)
        attach, fresh = timed(lambda: SuffixIndex.attach(directory))
        first_use, _ = timed(lambda: [fresh.open(p, []) for p in range(problems)])
        step(versions + 1)
        merge()
        refresh_live, _ = timed(fresh.refresh)
        return {
            "tokens": store.tokens,
            "problems": problems,
            "versions": versions,
            "bytes_per_token": store.nbytes / store.tokens,
            "file_bytes_per_token": store.file_bytes / store.tokens,
            "seal_step_ms": seal_ms,
            "merge_ms": merge_ms,
            "refresh_step_ms": refresh_step,
            "refresh_merged_ms": refresh_merged,
            "refresh_merged_all_live_ms": refresh_live,
            "attach_ms": attach,
            "first_use_of_all_problems_ms": first_use,
        }


def resident() -> int:
    """Return the bytes of this process in memory."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def run(
    work: dict[str, list[RecordedResponse]], every: int, log: Log
) -> dict[str, Any]:
    """Measure both drafters on all work; one that is not installed is named in
    `skipped`, with the reason.

    Costs are those of the drafters' default settings; for accepted tokens both draft up
    to 8.
    """
    names = list(ENGINES)
    skipped = {}
    try:
        Arctic()
    except DasError as error:
        names.remove("arctic")
        skipped["arctic"] = str(error)
        log(f"skipped {error}")
    result: dict[str, Any] = {
        "provenance": provenance(),
        "skipped": skipped,
        "mapping": mapping(),
        "work": {},
    }
    log(f"mapping: {result['mapping']}")
    for title, rollouts in work.items():
        found = groups(rollouts)[::every]
        entry: dict[str, Any] = {"groups": len(found), "cost": {}, "accepted": {}}
        for name in names:
            entry["cost"][name] = cost(
                Ours(min_chance=0.15) if name == "ours" else ENGINES[name](), rollouts
            )
            log(f"{title} cost {name}: {entry['cost'][name]}")
        for setting in SETTINGS:
            chosen = (
                [g for g in found if g.earlier]
                if setting.startswith("earlier")
                else found
            )
            if not chosen:
                continue
            entry["accepted"][setting] = {
                n: accepted(ENGINES[n](), chosen, setting, 8) for n in names
            }
            for name, figures in entry["accepted"][setting].items():
                log(
                    f"{title} {setting} {name}: {figures['accepted']:.3f} accepted per"
                    " round"
                )
        result["work"][title] = entry
    return result


@click.command()
@click.option(
    "--traces",
    type=click.Path(exists=True, path_type=Path),
    required=True,
    help="Directory of .npz.",
)
@click.option(
    "--every", default=1, show_default=True, help="Take every n-th group only."
)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(traces: Path, every: int, out: Path) -> None:
    """Measure the suffix index: insert, seal, memory, draft time, mapping, accepted
    tokens.
    """
    save(
        out,
        run(
            {file.stem: dumps.read(file) for file in sorted(traces.glob("*.npz"))},
            every,
            click.echo,
        ),
    )


if __name__ == "__main__":
    main()
