"""What the V2 runner's device index drafts on recorded rollouts, beside the host's
index; and what it costs in memory.

python benchmarks/v2_drafts.py --traces DIR --groups 64 --out FILE.json

Its kernels are computed by their plain reference
(`tests/contract/device_reference.py`), which drafts the same.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from index import accepted
from index_drafters import Ours
from index_workload import SETTINGS, groups
from provenance import provenance, save

from das_adapter.core.index.values import Int32
from das_adapter.engine.v2.device_index import DeviceIndex
from das_adapter.sim import rollouts as dumps

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "contract"))
from device_reference import launch

SLOTS = 32
BUDGET = 8


class Device(Ours):
    """The device index, driven as the benchmark of the host's index drives that one."""

    def __init__(self, length: int) -> None:
        super().__init__()
        texts = torch.zeros(SLOTS, length, dtype=torch.int32)
        self.device = DeviceIndex(texts, BUDGET, 2**27, 0.0, 2**23)
        self.device._launch = functools.partial(launch, self.device)  # type: ignore[method-assign]
        self.sealed_bytes: list[float] = []
        """Bytes a token of each problem's sealed text."""
        self._total = torch.zeros(SLOTS, dtype=torch.int32)
        self._free = list(range(SLOTS))
        self._begin = np.zeros(SLOTS, dtype=np.int64)

    def seal(self) -> None:
        super().seal()
        self.device.arena.forget()

    def open(self, problem: int, prompt: Int32) -> int:
        slot = self._free.pop()
        self.device.texts[slot, : len(prompt)] = torch.from_numpy(prompt)
        self._total[slot] = self._begin[slot] = len(prompt)
        self.device.open([(slot, problem, len(prompt))])
        arena = self.device.arena
        before = self.device.arena.used
        self.device.arena.copy_sealed(self.index)
        if arena.used > before:
            self.sealed_bytes.append(
                4 * (arena.used - before) / int(arena.tables.sealed_count[slot])
            )
        return slot

    def extend(self, handles: list[int], texts: list[Int32]) -> None:
        for slot, text in zip(handles, texts, strict=True):
            at = int(self._total[slot])
            self.device.texts[slot, at : at + len(text)] = torch.from_numpy(text)
            self._total[slot] += len(text)

    def draft(self, handles: list[int], budget: int) -> list[Int32]:
        writing = [slot for slot in handles if self._total[slot] > self._begin[slot]]
        slots = torch.tensor(writing, dtype=torch.int64)
        sampled = torch.ones(len(writing), dtype=torch.int32)
        drafts = self.device.draft(slots, sampled, self._total)
        lengths = self.device.real[: len(writing)].tolist()
        found = {
            s: d[:n]
            for s, d, n in zip(
                writing, drafts.numpy().astype(np.int32), lengths, strict=True
            )
        }
        return [found.get(slot, np.zeros(0, dtype=np.int32)) for slot in handles]

    def close(self, handles: list[int]) -> None:
        for slot in handles:
            self.device.close([(slot, 0)], self._total)
            self._free.append(slot)


class FirstRound(Ours):
    """The host's index without the drafts before the first token, which an engine on
    the V2 runner has sampled then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._writing: set[int] = set()

    def extend(self, handles: list[int], texts: list[Int32]) -> None:
        super().extend(handles, texts)
        self._writing.update(handles)

    def draft(self, handles: list[int], budget: int) -> list[Int32]:
        none = np.zeros(0, dtype=np.int32)
        return [
            d if h in self._writing else none
            for h, d in zip(handles, super().draft(handles, budget), strict=True)
        ]


@click.command()
@click.option(
    "--traces",
    type=click.Path(exists=True, path_type=Path),
    required=True,
    help="Directory of .npz.",
)
@click.option(
    "--groups",
    "most",
    default=64,
    show_default=True,
    help="Groups of each file, drawn at random.",
)
@click.option(
    "--longest", default=4096, show_default=True, help="Leave longer responses out."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Write the figures here, and as a table beside it.",
)
def main(traces: Path, most: int, longest: int, out: Path | None) -> None:
    """Compare accepted draft tokens per round."""
    work: dict[str, Any] = {}
    for file in sorted(traces.glob("*.npz")):
        chosen = [g for g in groups(dumps.read(file)) if 0 < len(g.target) <= longest]
        drawn = np.random.default_rng(0).permutation(len(chosen))[:most]
        chosen = [chosen[i] for i in sorted(drawn)]
        for g in chosen:
            g.siblings = [s[:longest] for s in g.siblings[:3]]
        room = max((len(g.prompt) for g in chosen), default=0) + longest + BUDGET + 1
        for setting in SETTINGS:
            some = (
                [g for g in chosen if g.earlier]
                if setting.startswith("earlier")
                else chosen
            )
            if not some:
                continue
            device = Device(room)
            on_device = accepted(device, some, setting, BUDGET, at_once=8)
            host = accepted(FirstRound(), some, setting, BUDGET, at_once=8)
            figures = {
                "groups": len(some),
                "host": host["accepted"],
                "device": on_device["accepted"],
                "ratio": on_device["accepted"] / host["accepted"],
                "rounds": on_device["rounds"],
            }
            figures["sealed_bytes_per_token"] = (
                float(np.mean(device.sealed_bytes)) if device.sealed_bytes else None
            )
            work.setdefault(file.stem, {})[setting] = figures
            click.echo(f"{file.stem} {setting}: {json.dumps(figures)}")
    if out:
        save(out, {"provenance": provenance(), "work": work})


if __name__ == "__main__":
    main()
