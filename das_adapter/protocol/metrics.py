"""What an engine worker counts between two weight syncs; the same figures for every drafter, and for none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from das_adapter.core.staleness import AGES


@dataclass
class Counters:
    """Counts since the last `take`, of training rollouts alone. A request forward is one request's share of one decode
    step of the target."""

    steps: int = 0
    request_forwards: int = 0
    drafted_forwards: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    tokens: int = 0
    busy_seconds: float = 0.0
    """From the begin of each step to its end, drafting included."""
    propose_seconds: list[float] = field(default_factory=list)
    error: str | None = None
    """What the drafter raised; from then on the engine decodes without it. Survives `take`."""
    alarm: str | None = None
    """What makes the drafter useless but not fail: its weights were not synced, or next to nothing is accepted.
    Survives `take`, until the next weight sync."""

    def step(self, sampled: Sequence[Sequence[int]], drafts: Sequence[int], seconds: float = 0.0) -> None:
        """Count one decode step.

        Args:
            sampled: tokens each request of the batch got; empty where its prompt is still being read.
            drafts: draft tokens each request carried into the step.
            seconds: it took.
        """
        self.steps += 1
        self.busy_seconds += seconds
        for tokens, drafted in zip(sampled, drafts, strict=True):
            if not tokens:
                continue
            self.request_forwards += 1
            self.tokens += len(tokens)
            if drafted:
                self.drafted_forwards += 1
                self.draft_tokens += drafted
                self.accepted_tokens += len(tokens) - 1

    def take(self) -> dict[str, Any]:
        """The counts as plain numbers (`merge` adds them up over workers), and start again at zero."""
        counts = {name: value for name, value in vars(self).items()}
        self.__init__(error=self.error, alarm=self.alarm)  # type: ignore[misc]
        return counts


def merge(parts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Figures of one training step from the counts of all engines, under the names the trainer logs.

    `das/tokens_per_s`: tokens an engine writes in a second of its steps, drafting included.
    `das/tokens_per_forward`: tokens per request forward, drafted or not. `das/draft_coverage`: share of request
    forwards that carried a draft. `das/acceptance_length`: tokens per drafted request forward (accepted + 1; vLLM's
    mean acceptance length). `das/verify_waste`: share of the tokens in the decode steps' forward passes that were
    rejected drafts. `das/health`: 1 healthy, 0 if a drafter raised, its weights were not synced, its acceptance
    collapsed, or speculation cost more than it saved.

    Where a controller decides: `das/budget_short` (`medium`, `long`): draft tokens per request forward by length class;
    `das/time_saved_s`: seconds of decoding saved, over all replicas; `das/latency_model_error`: mean relative error of
    the step times it predicted; `das/planned_rounds`: decode rounds in which DAS's optimal budgets would end the
    rollout, as far as lengths and acceptance are known (the slowest replica's).

    Where the history is drafted from: `das/accept_rate_age_*` (`none`, `1`, `2_4`, `older`): accepted share of the
    draft tokens by the weight versions since their problem was last written about.

    With a copy of the policy: `das/requantise_s`, seconds of the last weight sync's rounding; `das/drafter_bytes`, its
    memory; `das/self_acceptance`, the chance that one of its tokens is accepted.
    """
    added = ("request_forwards", "drafted_forwards", "draft_tokens", "accepted_tokens", "tokens", "busy_seconds")
    total = {name: sum(p[name] for p in parts) for name in added}
    forwards, drafted = total["request_forwards"], total["drafted_forwards"]
    rejected = total["draft_tokens"] - total["accepted_tokens"]
    seconds = np.concatenate([np.asarray(p["propose_seconds"], dtype=float) for p in parts] or [np.zeros(0)])
    metrics = {
        "das/tokens_per_forward": total["tokens"] / max(1, forwards),
        "das/tokens_per_s": total["tokens"] / max(1e-9, total["busy_seconds"]),
        "das/draft_coverage": drafted / max(1, forwards),
        "das/acceptance_length": 1.0 + total["accepted_tokens"] / max(1, drafted),
        "das/verify_waste": rejected / max(1, forwards + total["draft_tokens"]),
        "das/health": float(not any(map(_faulty, parts)) and not collapsed(total)),
        "rollout/spec_accept_rate": total["accepted_tokens"] / max(1, total["draft_tokens"]),
        "rollout/spec_accept_length": 1.0 + total["accepted_tokens"] / max(1, drafted),
        "rollout/spec_num_draft_tokens": float(total["draft_tokens"]),
        "rollout/spec_num_accepted_tokens": float(total["accepted_tokens"]),
        "rollout/spec_num_verify_steps": float(drafted),
    }
    if len(seconds):
        p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
        metrics |= {"das/propose_ms/p50": float(p50), "das/propose_ms/p99": float(p99)}
    decided = [p for p in parts if "class_rounds" in p]
    if decided:
        rounds, drafts = (np.sum([p[name] for p in decided], axis=0) for name in ("class_rounds", "class_drafts"))
        budgets = drafts / np.maximum(rounds, 1.0)
        metrics |= {
            f"das/budget_{name}": float(b) for name, b in zip(("short", "medium", "long"), budgets, strict=True)
        }
        metrics["das/time_saved_s"] = float(sum(p["time_saved_s"] for p in decided))
        metrics["das/planned_rounds"] = float(max(p["planned_rounds"] for p in decided))
        metrics["das/latency_model_error"] = float(np.mean([p["latency_model_error"] for p in decided]))
    if by_age := [p["staleness"] for p in parts if "staleness" in p]:
        for name, (tried, kept) in zip(AGES, np.sum(by_age, axis=0).tolist(), strict=True):
            if tried:
                metrics[f"das/accept_rate_age_{name}"] = kept / tried
    for name in ("requantise_s", "drafter_bytes", "self_acceptance"):
        if found := [p[name] for p in parts if name in p]:
            metrics[f"das/{name}"] = float(max(found))
    return metrics


COLLAPSE_RATE, COLLAPSE_TOKENS = 0.02, 2000


def collapsed(total: Mapping[str, float]) -> bool:
    """Whether drafting has stopped paying: of many draft tokens, next to none is accepted."""
    return total["draft_tokens"] >= COLLAPSE_TOKENS and total["accepted_tokens"] < COLLAPSE_RATE * total["draft_tokens"]


def _faulty(part: Mapping[str, Any]) -> bool:
    return any(part.get(name) for name in ("error", "alarm", "stopped"))
