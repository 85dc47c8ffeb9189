"""Vary keys of a simulation, over all cores."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from das_adapter.errors import ConfigError
from das_adapter.sim.config import SimConfig, parse
from das_adapter.sim.simulate import simulate


def variants(config: SimConfig, values: Mapping[str, Sequence[Any]]) -> Iterator[tuple[dict[str, Any], SimConfig]]:
    """Yield a config for each combination of values of keys such as `hardware.gpus`.

    Raises:
        ConfigError: there is no such key, or a value is not allowed.
    """
    for combination in itertools.product(*values.values()):
        chosen = dict(zip(values, combination, strict=True))
        content = config.model_dump(exclude_defaults=True)
        content["arms"] = {name: arm.model_dump(exclude_defaults=True) for name, arm in config.arms.items()}
        for key, value in chosen.items():
            block, *path = content, *key.split(".")
            for part in path[:-1]:
                block = block.setdefault(part, {})
                if not isinstance(block, dict):
                    raise ConfigError(f"{key}: {part} is no block")
            block[path[-1]] = value
        yield chosen, parse(content, " ".join(f"{k}={v}" for k, v in chosen.items()))


def sweep(
    config: SimConfig,
    values: Mapping[str, Sequence[Any]],
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Simulate all combinations in processes (`jobs` None: one a core); return their values and `summary`, in the order
    of `variants`. `progress` receives how many of how many are done."""
    chosen, configs = zip(*variants(config, values), strict=True)
    with ProcessPoolExecutor(min(jobs or os.cpu_count() or 1, len(configs)), get_context("spawn")) as pool:
        found = list[dict[str, Any]]()
        for result in pool.map(simulate, configs):
            found.append({"values": chosen[len(found)], "arms": result})
            if progress is not None:
                progress(len(found), len(configs))
    return found
