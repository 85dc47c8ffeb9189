"""Count the CUDA graphs that an engine captures, by vLLM's own rules; needs no GPU, but
a vLLM with the V2 runner.

PYTHONPATH=.venv/newest python benchmarks/graphs.py --requests 256 --out FILE.json

`stock`: vLLM without drafts; `one_length`: all requests of a step have equally many
draft tokens; `own_lengths`: each request has its own number. `full` graphs are replayed
by decode steps, `piecewise` ones by steps that read prompts; those of `device_index`
look up drafts, a few small kernels each.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import click
import torch
from provenance import provenance, save

from das_adapter.config import parse
from das_adapter.protocol.engine_args import v2_speculative_config


def manager(
    requests: int,
    speculative: dict[str, Any] | None,
    own_lengths: bool,
    sizes: str = "",
) -> Any:
    """Return vLLM's manager of the graphs of an engine, as if it had captured them.

    Args:
        requests: most requests of a step.
        speculative: vLLM's `speculative_config`.
        own_lengths: whether the requests of a step may have unequal numbers of draft
            tokens.
        sizes: vLLM's `cudagraph_capture_sizes`, with commas in between; empty: its own
            choice.
    """
    from vllm.config import CompilationConfig, CUDAGraphMode, VllmConfig
    from vllm.v1.worker.gpu import cudagraph_utils

    mode = CUDAGraphMode.FULL_AND_PIECEWISE
    num_draft_tokens = speculative["num_speculative_tokens"] if speculative else 0
    schedule = speculative and speculative.get("num_speculative_tokens_per_batch_size")
    config = SimpleNamespace(
        compilation_config=CompilationConfig(cudagraph_mode=mode),
        model_config=SimpleNamespace(enforce_eager=False),
        scheduler_config=SimpleNamespace(
            max_num_seqs=requests, max_num_batched_tokens=16384
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=speculative
        and SimpleNamespace(
            num_speculative_tokens_per_batch_size=schedule,
            uses_dynamic_speculative_decoding=lambda: schedule is not None,
        ),
        num_speculative_tokens=num_draft_tokens,
        uniform_decode_query_len=1 + num_draft_tokens,
        performance_mode="balanced",
    )
    VllmConfig._set_cudagraph_sizes(config)
    if sizes:
        config.compilation_config.cudagraph_capture_sizes = [
            *map(int, sizes.split(","))
        ]
        config.compilation_config.max_cudagraph_capture_size = max(
            config.compilation_config.cudagraph_capture_sizes
        )
    platform = SimpleNamespace(get_global_graph_pool=lambda: None)
    with (
        mock.patch.object(
            cudagraph_utils,
            "get_pp_group",
            lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True),
        ),
        mock.patch.object(cudagraph_utils, "current_platform", platform),
    ):
        found = cudagraph_utils.CudaGraphManager(
            config,
            torch.device("cpu"),
            mode,
            decode_query_len=1 + num_draft_tokens,
            varlen_decode=own_lengths,
        )
    found._graphs_captured = True
    return found


def captured(engine: Any) -> dict[str, int]:
    """Return the number of graphs by kind."""
    from das_adapter.engine.v2.speculator import looked_up_sizes

    graphs = {
        kind.name.lower(): len(graphs) for kind, graphs in engine._capture_descs.items()
    }
    looks = engine.vllm_config.speculative_config is not None
    return (
        graphs | {"device_index": len(looked_up_sizes(engine.vllm_config))}
        if looks
        else graphs
    )


def plain(engines: list[Any], requests: int) -> dict[str, int]:
    """Return for how many batches, of 1, 2, ... requests, a step without drafts of the
    last engine replays a graph of such steps, and for how many the same as the first
    engine.
    """
    graphs = [
        [e.dispatch(n, n, 1, 0, max_query_len=1) for n in range(1, requests + 1)]
        for e in engines
    ]
    same = sum(one == other for one, other in zip(*graphs, strict=True))
    return {
        "plain": sum(graph.uniform_token_count == 1 for graph in graphs[-1]),
        "plain_as_stock": same,
    }


def drafted_fit(engine: Any, requests: int, tokens: int) -> bool:
    """Return whether steps with drafts replay full graphs of unequal lengths, as far as
    these go.
    """
    largest, *_ = (
        d for kind in engine._capture_descs.values() for d in kind if d.max_query_len
    )
    steps = (
        (n, n + drafted)
        for n in range(1, requests + 1)
        for drafted in range(1, tokens * n + 1)
    )
    return all(
        engine.dispatch(n, total, None, 0, max_query_len=tokens + 1).max_query_len
        for n, total in steps
        if total <= largest.num_tokens
    )


@click.command()
@click.option("--requests", default=256, help="Most requests of a step.")
@click.option("--tokens", default=32, help="Most draft tokens of a request.")
@click.option(
    "--sizes",
    default="",
    help="Tokens for which graphs are captured, with commas in between.",
)
@click.option("--out", type=click.Path(path_type=Path))
def main(requests: int, tokens: int, sizes: str, out: Path | None) -> None:
    """Print the graphs of three engines as JSON."""
    from das_adapter.engine.v2.admission import capture_plain_steps

    das = parse({"drafter": "history", "max_draft_tokens": tokens})
    speculative = v2_speculative_config(das)
    ways = {
        "stock": (None, False),
        "one_length": (speculative, False),
        "own_lengths": (speculative, True),
    }
    capture_plain_steps.apply()
    engines = {name: manager(requests, *way, sizes) for name, way in ways.items()}
    found = {
        "requests": requests,
        "graphs": {name: captured(engine) for name, engine in engines.items()},
        **plain([engines["stock"], engines["own_lengths"]], requests),
        "drafted_fit": drafted_fit(engines["own_lengths"], requests, tokens),
    }
    print(json.dumps(found, indent=1))
    if out is not None:
        save(out, {"provenance": provenance(), **found})


if __name__ == "__main__":
    main()
