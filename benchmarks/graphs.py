"""Count the CUDA graphs that an engine captures, by vLLM's own rules; needs no GPU, but a vLLM with the V2 runner.

PYTHONPATH=.venv/newest python benchmarks/graphs.py --requests 256 --out FILE.json

`stock`: vLLM without drafts; `one_length`: all requests of a step have equally many draft tokens; `own_lengths`: each
request has its own number. `full` graphs are replayed by decode steps, `piecewise` ones by steps that read prompts.
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


def captured(requests: int, speculative: dict[str, Any] | None, own_lengths: bool) -> dict[str, int]:
    """Return the number of graphs by kind.

    Args:
        requests: most requests of a step.
        speculative: vLLM's `speculative_config`.
        own_lengths: whether the requests of a step may have unequal numbers of draft tokens.
    """
    from vllm.config import CompilationConfig, CUDAGraphMode, VllmConfig
    from vllm.v1.worker.gpu import cudagraph_utils

    mode = CUDAGraphMode.FULL_AND_PIECEWISE
    most = speculative["num_speculative_tokens"] if speculative else 0
    schedule = speculative and speculative.get("num_speculative_tokens_per_batch_size")
    config = SimpleNamespace(
        compilation_config=CompilationConfig(cudagraph_mode=mode),
        model_config=SimpleNamespace(enforce_eager=False),
        scheduler_config=SimpleNamespace(max_num_seqs=requests, max_num_batched_tokens=16384),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=speculative
        and SimpleNamespace(
            num_speculative_tokens_per_batch_size=schedule,
            uses_dynamic_speculative_decoding=lambda: schedule is not None,
        ),
        num_speculative_tokens=most,
        uniform_decode_query_len=1 + most,
        performance_mode="balanced",
    )
    VllmConfig._set_cudagraph_sizes(config)
    platform = SimpleNamespace(get_global_graph_pool=lambda: None)
    with (
        mock.patch.object(
            cudagraph_utils, "get_pp_group", lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True)
        ),
        mock.patch.object(cudagraph_utils, "current_platform", platform),
    ):
        manager = cudagraph_utils.CudaGraphManager(
            config, torch.device("cpu"), mode, decode_query_len=1 + most, varlen_decode=own_lengths
        )
    return {kind.name.lower(): len(graphs) for kind, graphs in manager._capture_descs.items()}


@click.command()
@click.option("--requests", default=256, help="Most requests of a step.")
@click.option("--tokens", default=16, help="Most draft tokens of a request.")
@click.option("--out", type=click.Path(path_type=Path))
def main(requests: int, tokens: int, out: Path | None) -> None:
    """Print the graphs of three engines as JSON."""
    das = parse({"drafter": "history", "max_draft_tokens": tokens})
    assert das is not None
    speculative = v2_speculative_config(das)
    ways = {"stock": (None, False), "one_length": (speculative, False), "own_lengths": (speculative, True)}
    counts = {name: captured(requests, *way) for name, way in ways.items()}
    print(json.dumps(counts, indent=1))
    if out is not None:
        save(out, {"provenance": provenance(), "requests": requests, "graphs": counts})


if __name__ == "__main__":
    main()
