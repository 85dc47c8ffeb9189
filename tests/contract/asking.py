"""How a round's requests are told to vLLM, and those that it refuses or aborts."""

from __future__ import annotations

import itertools
from typing import Any

from jobs import Request

from das_adapter.core.identity import prompt_identity


def beside(request: Request) -> dict[str, Any]:
    """What belongs to a request's prompt beside its tokens: an image, or a salt."""
    if request.image is None:
        return {"cache_salt": request.salt} if request.salt else {}
    import numpy as np
    from PIL import Image
    from tiny_models import PIXELS

    noise = np.random.default_rng(request.image).integers(
        0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8
    )
    return {"multi_modal_data": {"image": Image.fromarray(noise)}}


def abort_last(llm: Any, number: int) -> None:
    """Abort the last requests after 24 steps of the engine."""
    engine = llm.llm_engine
    stock = type(engine).step
    steps = itertools.count()
    ids = []

    def step() -> Any:
        at = next(steps)
        if not at:
            ids.extend(list(engine.output_processor.request_states)[-number:])
        if at == 24:
            engine.abort_request(ids, internal=True)
        return stock(engine)

    engine.step = step


def labelled(request: Request) -> Request:
    """Return a request with its problem, as hosts send it."""
    return (
        request
        if "das_problem" in request.label
        else request.labelled(das_problem=prompt_identity(request.prompt))
    )


def refusal(llm: Any, request: Request, label: dict[str, Any]) -> str | None:
    """Send a request with a label as a stranger may write it; return how its refusal
    begins, which a server answers with status 400.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    params = SamplingParams(
        **sampling(Request(request.prompt, request.having(max_tokens=1).params, label))
    )
    try:
        llm.generate([{"prompt_token_ids": request.prompt}], [params], use_tqdm=False)
    except VLLMValidationError as error:
        return str(error).partition(", allowed")[0]
    return None


def sampling(request: Request) -> dict[str, Any]:
    """Return the arguments of vLLM's `SamplingParams`."""
    from vllm.sampling_params import StructuredOutputsParams

    params = {"logprobs": 0, **request.params, "extra_args": request.label or None}
    if "structured_outputs" in params:
        params["structured_outputs"] = StructuredOutputsParams(
            **params["structured_outputs"]
        )
    return params


def adapter(directory: str) -> Any:
    """Name a LoRA adapter to vLLM."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, directory)
