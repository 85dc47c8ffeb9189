"""Replay recorded rollouts through the suffix index: accepted draft tokens, calibration, time.

    python benchmarks/index_traces.py TRACES_DIR [--every 4] [--trace NAME] [--setting growing]

TRACES_DIR holds NAME.npz files (token ids, offsets, problem, run, step per response; see `read`). The last sample of
each group (same problem, run, step; groups of `samples`) is generated again: a draft is accepted as far as it equals
the recorded response, then one more token is written. The others are its source:

    growing   siblings as long as the response is now, and the response's own text and prompt
    history   finished siblings, sealed, and own
    steps     rollouts of the same prompt by earlier policies, sealed, growing siblings, and own
    own       own text and prompt only

`speed` times sealing and a batch of requests on a mix of the responses instead.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from das_adapter.core.index import SuffixIndex

SAMPLES = {"code_humaneval_codegen16b_k100": 8, "tot_gpt4_game24_cot_k100": 8}  # 3 where not named
CHUNKS = 5  # groups taken from each problem
# Accepted per round of a plain drafter (longest match up to 24, most frequent continuation, budget 8).
PLAIN = {
    "rl_reasoning_gym_qwen25_3b_k3": {"own": 1.32, "growing": 1.59, "history": 2.74},
    "misguided_attention_k3": {"own": 0.86, "growing": 1.01, "history": 1.16},
    "code_humaneval_codegen16b_k100": {"own": 0.43, "growing": 0.68, "history": 1.09},
    "tot_gpt4_game24_cot_k100": {"own": 0.44, "growing": 0.59, "history": 3.03},
}


@dataclass
class Group:
    """One response to generate again, and what it may draft from."""

    problem: int
    prompt: np.ndarray
    target: np.ndarray
    siblings: list[np.ndarray]
    earlier: list[tuple[int, np.ndarray]]
    handle: int = 0
    sibling_handles: list[int] = field(default_factory=list)
    position: int = 0


def read(path: Path, every: int) -> list[Group]:
    d = np.load(path)
    ids, offsets, samples = d["ids"], d["offsets"], SAMPLES.get(path.stem, 3)
    members: dict[tuple[int, int], dict[int, list[int]]] = {}
    for i, (problem, run, step) in enumerate(zip(d["problem"], d["run"], d["step"], strict=True)):
        members.setdefault(int(problem), {}).setdefault((int(step), int(run)), []).append(i)
    groups = []
    for problem, policies in members.items():
        prompt = d["prompt_ids"][d["prompt_offsets"][problem] : d["prompt_offsets"][problem + 1]]
        for (step, _run), rows in sorted(policies.items()):
            texts = [ids[offsets[i] : offsets[i + 1]] for i in rows]
            earlier = [(s, ids[offsets[i] : offsets[i + 1]]) for (s, _), r in policies.items() if s < step for i in r]
            for c in range(min(CHUNKS, len(texts) // samples)):
                chunk = texts[c * samples : (c + 1) * samples]
                groups.append(Group(len(groups), prompt, chunk[-1], chunk[:-1], earlier))
    return groups[::every]


def replay(groups: list[Group], setting: str, budget: int, min_chance: float) -> dict[str, float | list[str]]:
    index = SuffixIndex()
    for g in groups:
        g.position, g.sibling_handles = 0, []
        for version, text in g.earlier if setting == "steps" else []:
            index.add(g.problem, text, version)
        for text in g.siblings if setting == "history" else []:
            index.add(g.problem, text, 1000)
    index.seal()
    for g in groups:
        g.handle = index.open(g.problem, g.prompt)
        if setting in ("growing", "steps"):
            g.sibling_handles = [index.open(g.problem, g.prompt) for _ in g.siblings]
    rounds = accepted = drafted = 0
    draft_s = extend_s = 0.0
    bins = np.zeros((10, 3))  # tokens, sum of chances, survivors
    active = groups
    while active:
        handles = np.array([g.handle for g in active])
        start = time.perf_counter()
        tokens, chances, offsets = index.draft_flat(handles, np.full(len(active), budget), min_chance)
        draft_s += time.perf_counter() - start
        to_extend, flat = [], []
        survived = np.zeros(len(tokens), dtype=bool)
        bounds = offsets.tolist()
        for g, a, b in zip(active, bounds, bounds[1:], strict=False):
            target = g.target[g.position : g.position + b - a]
            wrong = np.flatnonzero(target != tokens[a : a + len(target)])
            kept = int(wrong[0]) if len(wrong) else len(target)
            survived[a : a + kept] = True
            accepted += kept
            old, g.position = g.position, g.position + kept + 1
            to_extend.append(g.handle)
            flat.append(g.target[old : g.position])
            for h, text in zip(g.sibling_handles, g.siblings, strict=False):
                if old < len(text):
                    to_extend.append(h)
                    flat.append(text[old : g.position])
        rounds += len(active)
        drafted += len(tokens)
        which = np.minimum((chances * 10).astype(int), 9)
        for column, values in enumerate((np.ones(len(tokens)), chances, survived)):
            bins[:, column] += np.bincount(which, weights=values, minlength=10)
        ends = np.zeros(len(flat) + 1, dtype=np.int64)
        np.cumsum([len(x) for x in flat], out=ends[1:])
        joined, many = np.concatenate(flat), np.array(to_extend)
        start = time.perf_counter()
        index.extend_many(many, joined, ends)
        extend_s += time.perf_counter() - start
        for g in active:
            if g.position >= len(g.target):
                index.close(g.handle, keep=False)
                for h in g.sibling_handles:
                    index.close(h, keep=False)
        active = [g for g in active if g.position < len(g.target)]
    count = np.maximum(bins[:, 0], 1)
    return {
        "rounds": rounds,
        "accepted": accepted / rounds,
        "drafted": drafted / rounds,
        "draft_us": draft_s / rounds * 1e6,
        "extend_us": extend_s / rounds * 1e6,
        "calibration_error": float(np.abs(bins[:, 1] - bins[:, 2]).sum() / bins[:, 0].sum()),
        "calibration": [f"{p:.2f}>{a:.2f}" for p, a in zip(bins[:, 1] / count, bins[:, 2] / count, strict=True)],
    }


def speed(groups: list[Group], batch: int = 256, samples: int = 16) -> None:
    """Sealing speed, and the time of one step (extend and draft) of `batch` requests in groups of `samples`."""
    texts = [t for g in groups for t in (*g.siblings, g.target) if len(t) >= 64]
    texts = [texts[i] for i in np.random.default_rng(0).permutation(len(texts))[: 4 * batch]]
    problems = batch // samples
    index, total = SuffixIndex(), 0
    for i, text in enumerate(texts):
        index.add(i % problems, text, i // batch)
        total += len(text)
    start = time.perf_counter()
    index.seal()
    print(f"seal {total / (time.perf_counter() - start) / 1e6:.2f} M tokens/s, {index.nbytes / total:.2f} B/token")
    live = texts[-batch:]
    for size in (1, 16, batch):
        requests = [index.open(i % problems, [], prefix=t[: len(t) // 2]) for i, t in enumerate(live)][:size]
        at = [len(t) // 2 for t in live[:size]]
        steps: list[tuple[float, float]] = []
        for _ in range(100):
            flat = [t[p : p + 3] for t, p in zip(live, at, strict=False)]
            at = [p + 3 for p in at]
            ends = np.zeros(size + 1, dtype=np.int64)
            np.cumsum([len(x) for x in flat], out=ends[1:])
            joined, handles, budgets = np.concatenate(flat), np.array(requests), np.full(size, 8)
            start = time.perf_counter()
            index.extend_many(handles, joined, ends)
            middle = time.perf_counter()
            index.draft_flat(handles, budgets)
            steps.append((middle - start, time.perf_counter() - middle))
        extend, draft = np.median(steps, axis=0) * 1e3
        high = np.percentile(np.sum(steps, axis=1), 99) * 1e3
        print(
            f"batch {size}: extend {extend:.3f} + draft {draft:.3f} ms per step (sum's p99 {high:.3f}), "
            f"{(extend + draft) / size * 1e3:.2f} us per request"
        )
        index.clear_live()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--every", type=int, default=1, help="take every n-th group only")
    parser.add_argument("--trace", help="one trace of the directory instead of all")
    parser.add_argument("--setting", choices=["own", "growing", "history", "steps", "speed"])
    parser.add_argument("--budget", type=int, default=8)
    parser.add_argument("--min-chance", type=float, default=0.15)
    args = parser.parse_args()
    for path in sorted(args.traces.glob(f"{args.trace or '*'}.npz")):
        groups = read(path, args.every)
        settings = [args.setting] if args.setting else ["own", "growing", "history", "steps"]
        for setting in settings:
            if setting == "speed":
                speed(groups)
                continue
            chosen = [g for g in groups if g.earlier] if setting == "steps" else groups
            if not chosen:
                continue
            r = replay(chosen, setting, args.budget, args.min_chance)
            plain = PLAIN.get(path.stem, {}).get(setting)
            ratio = f" = {r['accepted'] / plain:.2f} x plain" if plain else ""
            print(
                f"{path.stem} {setting}: accepted {r['accepted']:.3f}{ratio}, drafted {r['drafted']:.2f}, "
                f"{r['rounds']} rounds, draft {r['draft_us']:.2f} us, extend {r['extend_us']:.2f} us, "
                f"calibration error {r['calibration_error']:.3f}\n    chance>actual {' '.join(r['calibration'])}"
            )


if __name__ == "__main__":
    main()
