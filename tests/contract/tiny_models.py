"""Write tiny policies of several kinds, with random weights and the vocabulary of the tiny policy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from engine import POLICY

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 96, "max_position_embeddings": 2048,
         "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None, "tie_word_embeddings": False}  # fmt: skip


def mixture_of_experts() -> Any:
    """Qwen3-MoE: 8 experts, 2 of them for each token."""
    config = transformers.Qwen3MoeConfig(
        **SHAPE, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, mlp_only_layers=[]
    )
    return transformers.Qwen3MoeForCausalLM(config)


def write(kind: str, directory: Path) -> str:
    """Write a policy of a kind, with random weights, whose next token is neither certain nor arbitrary."""
    model, generator = KINDS[kind](), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                gain = 3.0 if "lm_head" in name else 1.0 if "embed" not in name else weight.shape[-1] ** 0.5
                weight.normal_(std=gain * weight[0].numel() ** -0.5, generator=generator)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(POLICY / name, directory)
    return str(directory)


KINDS = {"experts": mixture_of_experts}
