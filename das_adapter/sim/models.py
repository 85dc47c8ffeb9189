"""Sizes of common models, so that nothing has to be downloaded; any other comes from
its config.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from das_adapter.core.policy_sizes import DENSE, FAMILIES, policy_sizes
from das_adapter.errors import DasError

_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
)
"""Columns of `_SIZES`."""
_EXPERTS = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
}
# fmt: off
_SIZES: dict[str, tuple[int, ...]] = {
    "Qwen/Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 64, 151936, True),
    "Qwen/Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 128, 151936, True),
    "Qwen/Qwen2.5-3B": (2048, 11008, 36, 16, 2, 128, 151936, True),
    "Qwen/Qwen2.5-7B": (3584, 18944, 28, 28, 4, 128, 152064, False),
    "Qwen/Qwen2.5-14B": (5120, 13824, 48, 40, 8, 128, 152064, False),
    "Qwen/Qwen2.5-32B": (5120, 27648, 64, 40, 8, 128, 152064, False),
    "Qwen/Qwen2.5-72B": (8192, 29568, 80, 64, 8, 128, 152064, False),
    "Qwen/Qwen3-0.6B": (1024, 3072, 28, 16, 8, 128, 151936, True),
    "Qwen/Qwen3-1.7B": (2048, 6144, 28, 16, 8, 128, 151936, True),
    "Qwen/Qwen3-4B": (2560, 9728, 36, 32, 8, 128, 151936, True),
    "Qwen/Qwen3-8B": (4096, 12288, 36, 32, 8, 128, 151936, False),
    "Qwen/Qwen3-14B": (5120, 17408, 40, 40, 8, 128, 151936, False),
    "Qwen/Qwen3-32B": (5120, 25600, 64, 64, 8, 128, 151936, False),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B":
        (1536, 8960, 28, 12, 2, 128, 151936, False),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B":
        (3584, 18944, 28, 28, 4, 128, 152064, False),
    "meta-llama/Llama-3.1-8B": (4096, 14336, 32, 32, 8, 128, 128256, False),
    "meta-llama/Llama-3.1-70B": (8192, 28672, 80, 64, 8, 128, 128256, False),
    "meta-llama/Llama-3.2-1B": (2048, 8192, 16, 32, 8, 64, 128256, True),
    "meta-llama/Llama-3.2-3B": (3072, 8192, 28, 24, 8, 128, 128256, True),
    "Qwen/Qwen3-30B-A3B": (2048, 6144, 48, 32, 4, 128, 151936, False),
    "Qwen/Qwen3-235B-A22B": (4096, 12288, 94, 64, 4, 128, 151936, False),
}
# fmt: on
MODELS: dict[str, dict[str, Any]] = {
    name: dict(zip(_KEYS, values, strict=True)) for name, values in _SIZES.items()
}
"""The sizes in the models' own `config.json`, by name on the hub."""
MODELS["Qwen/Qwen3-30B-A3B"] |= _EXPERTS | {"moe_intermediate_size": 768}
MODELS["Qwen/Qwen3-235B-A22B"] |= _EXPERTS
_DELTANET = {
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS_OF_512 = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
# fmt: off
_RECURRENT: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "Qwen/Qwen3-Next-80B-A3B": (
        (2048, 5120, 48, 16, 2, 256, 151936, False),
        {"model_type": "qwen3_next", "num_experts": 512, "num_experts_per_tok": 10}
        | _EXPERTS_OF_512,
    ),
    "Qwen/Qwen3.5-9B": (
        (4096, 12288, 32, 16, 4, 256, 248320, False),
        {"model_type": "qwen3_5_text"},
    ),
    "Qwen/Qwen3.5-35B-A3B": (
        (2048, 0, 40, 16, 2, 256, 248320, False),
        {"model_type": "qwen3_5_moe_text", "num_experts": 256, "num_experts_per_tok": 8}
        | _EXPERTS_OF_512,
    ),
}
# fmt: on
for _name, (_values, _more) in _RECURRENT.items():
    MODELS[_name] = dict(zip(_KEYS, _values, strict=True)) | _DELTANET | _more


def sizes(model: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of a model, under the names of a Hugging Face config: of a name
    in the table (instruct, base, thinking, math and coder variants have the sizes of
    the plain one), of a `config.json` or its directory; sizes stay as they are.

    Raises:
        DasError: it is none of these, a size is missing, or its layers are not those
            that `policy_sizes` knows.
    """
    if isinstance(model, Mapping):
        found = dict(model)
        _check(found, "model")
        return found
    path = Path(model)
    if not path.exists():
        return _of_name(model)
    if path.is_dir():
        path = path / "config.json"
    try:
        text = path.read_text()
        content = json.loads(text)
    except (OSError, ValueError) as error:
        raise DasError(
            f"model: found {str(path)!r}, expected a config.json: {error}"
        ) from None
    found = content.get("text_config", content)
    _check(found, str(path))
    return found


def _of_name(model: str) -> dict[str, Any]:
    """Return the sizes of a model in the table.

    Raises:
        DasError: it is not in the table.
    """
    plain = re.sub(r"-(Instruct|Base|Math|Coder|Thinking|\d{4}$)", "", model)
    searched = plain.rpartition("/")[2].lower()
    for name, known in MODELS.items():
        short = name.partition("/")[2].lower()
        if short == searched:
            return dict(known)
    raise DasError(
        f"model: found {model!r}, allowed: the path of its config.json (`hf download"
        f" {model} config.json` prints where it is), or one of {', '.join(MODELS)}"
    )


def _check(found: Mapping[str, Any], where: str) -> None:
    """Check that no size is missing, and that the layers are of a known kind.

    Raises:
        DasError: a size is missing, or a key has a value that is not allowed.
    """
    dense = found.get("model_type") not in FAMILIES - DENSE
    for key in ("kv_lora_rank", "n_routed_experts"):
        if dense and found.get(key):
            raise DasError(f"{where}: found {key}={found[key]!r}, allowed: none")
    try:
        policy_sizes(found)
    except KeyError as error:
        raise DasError(f"{where}: lacks {error.args[0]}") from None
    except DasError as error:
        raise DasError(f"{where}: {error}") from None
