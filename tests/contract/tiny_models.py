"""Write tiny policies of several kinds, with random weights and the vocabulary of the
tiny policy.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from jobs import IMAGE_TOKENS, POLICY
from safetensors.torch import load_file, save_file

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 96,
    "max_position_embeddings": 2048,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}


def mixture_of_experts() -> Any:
    """Qwen3-MoE: 8 experts, 2 of them for each token."""
    config = transformers.Qwen3MoeConfig(
        **SHAPE,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[],
    )
    return transformers.Qwen3MoeForCausalLM(config)


PIXELS = 16
"""An image's side."""
RECURRENT = {
    name: value for name, value in SHAPE.items() if name != "num_hidden_layers"
}


def deltanet(dense: Sequence[int] = (0, 1, 2)) -> Any:
    """Qwen3-Next: three layers of Gated DeltaNet, one of attention; those that are not
    `dense` have experts.
    """
    config = transformers.Qwen3NextConfig(
        **RECURRENT,
        num_hidden_layers=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        mlp_only_layers=list(dense),
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    return transformers.Qwen3NextForCausalLM(config)


def mamba2() -> Any:
    """Nemotron-H: two layers of Mamba2, one of attention, two of feed-forward."""
    config = transformers.NemotronHConfig(
        **RECURRENT,
        layers_block_type=["mamba", "mlp", "mamba", "attention", "mlp"],
        mamba_num_heads=4,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=2,
        conv_kernel=4,
        chunk_size=16,
    )
    return transformers.NemotronHForCausalLM(config)


def short_convolutions() -> Any:
    """LFM2: three layers of short convolutions, one of attention."""
    config = transformers.Lfm2Config(
        **RECURRENT,
        num_hidden_layers=4,
        layer_types=["conv", "conv", "full_attention", "conv"],
        conv_L_cache=3,
        conv_bias=False,
        # which vLLM reads
        block_dim=64,
        conv_dim=64,
        block_auto_adjust_ff_dim=False,
    )
    return transformers.Lfm2ForCausalLM(config)


def qwen3_5() -> Any:
    """Qwen3.5: three layers of Gated DeltaNet, one of attention with multimodal rotary
    positions (M-RoPE), behind a vision tower of one layer.
    """
    text = {
        **RECURRENT,
        "vocab_size": 100,
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": PIXELS // 4,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 16,
    }
    config = transformers.Qwen3_5Config(
        text_config=text,
        vision_config=vision,
        **{f"{name}_token_id": token for name, token in IMAGE_TOKENS.items()},
    )
    return transformers.Qwen3_5ForConditionalGeneration(config)


def write_qwen_processor(directory: Path) -> None:
    """Write what reads images and videos for Qwen3.5, and a tokenizer with tokens for
    them.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(POLICY)
    names = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    for name, token in IMAGE_TOKENS.items():
        added = names.get(name, f"<|{name}|>")
        tokenizer.add_special_tokens({"additional_special_tokens": [added]})
        assert tokenizer.convert_tokens_to_ids(added) == token
    tokenizer.save_pretrained(directory)
    reader = {
        "patch_size": PIXELS // 4,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": PIXELS**2, "longest_edge": PIXELS**2},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "processor_class": "Qwen3VLProcessor",
    }
    images = {**reader, "image_processor_type": "Qwen2VLImageProcessorFast"}
    videos = {**reader, "video_processor_type": "Qwen3VLVideoProcessor"}
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    (directory / "video_preprocessor_config.json").write_text(json.dumps(videos))


def images() -> Any:
    """BLIP-2: a vision tower and a Q-Former of one layer, which make two tokens of an
    image, before an OPT.
    """
    small = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision = transformers.Blip2VisionConfig(
        **small, image_size=PIXELS, patch_size=PIXELS // 2
    )
    between = transformers.Blip2QFormerConfig(
        **small, encoder_hidden_size=32, cross_attention_frequency=1
    )
    sizes = {
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 128,
        "num_hidden_layers": 2,
        "vocab_size": 97,
    }
    ends = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    text = transformers.OPTConfig(**sizes, **ends, num_attention_heads=2)
    config = transformers.Blip2Config(
        vision_config=vision,
        qformer_config=between,
        text_config=text,
        num_query_tokens=2,
        image_token_index=96,
    )
    return transformers.Blip2ForConditionalGeneration(config)


def write_image_processor(directory: Path) -> None:
    """Write what reads images for BLIP-2, and a tokenizer with a token for them."""
    reader = transformers.BlipImageProcessorPil(
        size={"height": PIXELS, "width": PIXELS}
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(POLICY)
    transformers.Blip2Processor(reader, tokenizer, num_query_tokens=2).save_pretrained(
        directory
    )


def write(kind: str, directory: Path) -> str:
    """Write a policy of a kind, with random weights, whose next token is neither
    certain nor arbitrary.
    """
    if kind == "mtp":
        return write_mtp(directory)
    model = KINDS[kind]()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                gain = (
                    3.0
                    if "lm_head" in name
                    else 1.0
                    if "embed" not in name
                    else weight.shape[-1] ** 0.5
                )
                weight.normal_(
                    std=gain * weight[0].numel() ** -0.5, generator=generator
                )
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(POLICY / name, directory)
    if kind == "mamba2":
        # as in NVIDIA's checkpoints
        path = directory / "model.safetensors"
        weights = load_file(path)
        weights["backbone.embeddings.weight"] = weights.pop("backbone.embedding.weight")
        save_file(weights, path, metadata={"format": "pt"})
    if kind == "images":
        write_image_processor(directory)
    if kind == "qwen3_5":
        write_qwen_processor(directory)
    if kind == "deltanet_mtp":
        add_mtp(directory)
    return str(directory)


KINDS = {
    "experts": mixture_of_experts,
    "images": images,
    "qwen3_5": qwen3_5,
    "deltanet": deltanet,
    "deltanet_mtp": functools.partial(deltanet, dense=(1, 2)),
    "mamba2": mamba2,
    "short_convolutions": short_convolutions,
}


@functools.cache
def tiny_policy() -> tuple[Any, list[torch.Tensor]]:
    """Return the tiny policy and texts of its own, int64 [12, length] each."""
    from requested import prompts

    policy = transformers.Qwen2ForCausalLM.from_pretrained(
        POLICY, dtype=torch.float32
    ).eval()
    torch.manual_seed(0)
    sampled = {
        "max_new_tokens": 60,
        "min_new_tokens": 60,
        "do_sample": True,
        "top_k": 0,
    }
    return policy, [
        policy.generate(torch.tensor([prompt] * 12), **sampled) for prompt in prompts(6)
    ]


def unit(x: torch.Tensor) -> torch.Tensor:
    """Return x with a root mean square of 1 in the last dimension."""
    return x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()


def random_layer(
    size: int, inner: int, kv: int, bound: float
) -> dict[str, torch.Tensor]:
    """Return the matrices of a decoder layer with heads of width `size` in all, random:
    0.02 wide, and those of its outputs `bound`.
    """
    generator = torch.Generator().manual_seed(0)
    rows = {
        "self_attn.q_proj": (size, size),
        "self_attn.k_proj": (kv, size),
        "self_attn.v_proj": (kv, size),
        "self_attn.o_proj": (size, size),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    wide = {
        name: bound if name.endswith(("o_proj", "down_proj")) else 0.02 for name in rows
    }
    return {
        f"{name}.weight": torch.randn(of, generator=generator) * wide[name]
        for name, of in rows.items()
    }


MASK = 2
"""Token that stands for those that are to be drafted; the padding's embedding is 0."""


def write_parallel(method: str, directory: Path) -> None:
    """Write a drafter of the tiny policy for `dflash` or `dspark`. Its layers are
    random and weak; it drafts what the policy writes most, or, `dspark`, what it writes
    most after the token before.
    """
    policy, texts = tiny_policy()
    size = policy.config.hidden_size
    vocab = policy.config.vocab_size
    inner = 128
    kv = 128
    pairs = torch.cat(
        [
            torch.stack([text[:, :-1].flatten(), text[:, 1:].flatten()])
            for text in texts
        ],
        dim=1,
    )
    counts = torch.zeros(vocab, vocab).index_put_(
        tuple(pairs), torch.ones(()), accumulate=True
    )
    common = (counts.sum(0) + 1).log()
    after = (counts + 0.5).log()
    read = policy.lm_head.weight.detach() * unit(
        policy.model.embed_tokens.weight[MASK].detach()
    )
    weights = {
        "fc.weight": (
            torch.randn(size, 3 * size, generator=torch.Generator().manual_seed(1))
            * 0.02
        ),
        "hidden_norm.weight": torch.ones(size),
        "norm.weight": torch.linalg.lstsq(read, common - common.mean()).solution,
    }
    for i in range(2):
        layer = random_layer(size, inner, kv, 0.0005)
        layer |= {
            f"{name}_layernorm.weight": torch.ones(size)
            for name in ("input", "post_attention")
        }
        layer |= {f"self_attn.{name}_norm.weight": torch.ones(64) for name in "qk"}
        weights |= {f"layers.{i}.{name}": weight for name, weight in layer.items()}
    reads = {"mask_token_id": MASK, "target_layer_ids": [0, 1, 2]}
    own = {"architectures": ["DFlashDraftModel"], "dflash_config": reads}
    if method == "dspark":
        own = {"architectures": ["Qwen3DSparkModel"], "markov_rank": vocab, **reads}
        weights["norm.weight"] *= 0.1
        weights["markov_head.markov_w1.weight"] = torch.eye(vocab)
        weights["markov_head.markov_w2.weight"] = (
            after - after.mean(1, keepdim=True)
        ).T.contiguous()
    config = transformers.Qwen3Config(
        hidden_size=size,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=size // 64,
        num_key_value_heads=kv // 64,
        head_dim=64,
        vocab_size=vocab,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        dtype="float32",
        **own,
    )
    config.save_pretrained(directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def next_token_reader(
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Return the matrix that makes the policy's next hidden state of its last one and
    the embedding of the token that was written, float32 [size, 2 * size], by least
    squares. `pairs`: hidden states and embeddings of texts, [1, length, size] each.
    """
    read = torch.cat(
        [
            torch.cat([unit(h[:, :-1]), unit(e[:, 1:])], -1).flatten(0, 1)
            for h, e in pairs
        ]
    )
    target = torch.cat([unit(h[:, 1:]).flatten(0, 1) for h, _ in pairs])
    gram = read.T @ read + 10.0 * torch.eye(read.shape[1])
    return torch.linalg.solve(gram, read.T @ target).T.contiguous()


def add_mtp(directory: Path) -> None:
    """Give a tiny policy of Qwen3-Next a layer for multi-token prediction, as
    `write_mtp` does; its experts are those of the first layer, weakened.
    """
    policy = transformers.Qwen3NextForCausalLM.from_pretrained(
        directory, dtype=torch.float32
    ).eval()
    shape = policy.config
    texts = policy.generate(
        torch.arange(2, 66)[:, None],
        max_new_tokens=60,
        do_sample=True,
        temperature=0.3,
        top_k=0,
    )
    with torch.no_grad():
        states = policy.model(texts).last_hidden_state
        embeds = policy.model.embed_tokens(texts)
    size = shape.hidden_size
    path = directory / "model.safetensors"
    weights = load_file(path)
    attention = random_layer(size, shape.intermediate_size, shape.head_dim, 0.002)
    layer = {name: weight for name, weight in attention.items() if "self_attn" in name}
    first = "model.layers.0."
    layer |= {
        name.removeprefix(first): 0.1 * weight
        for name, weight in weights.items()
        if name.startswith(f"{first}mlp.")
    }
    # queries and their gate
    layer["self_attn.q_proj.weight"] = layer["self_attn.q_proj.weight"].repeat(2, 1)
    layer |= {
        f"self_attn.{name}_norm.weight": torch.zeros(shape.head_dim) for name in "qk"
    }
    layer |= {
        f"{name}_layernorm.weight": torch.zeros(size)
        for name in ("input", "post_attention")
    }
    by_hidden, by_embeds = next_token_reader([(states, embeds)]).chunk(2, dim=1)
    mtp = {f"layers.0.{name}": weight for name, weight in layer.items()}
    mtp |= {
        "fc.weight": torch.cat([by_embeds, by_hidden], dim=1),
        "norm.weight": torch.zeros(size),
        "pre_fc_norm_hidden.weight": torch.zeros(size),
        "pre_fc_norm_embedding.weight": torch.zeros(size),
    }
    weights |= {f"mtp.{name}": each for name, each in mtp.items()}
    save_file(weights, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (directory / "config.json").write_text(json.dumps(config))


def write_mtp(directory: Path) -> str:
    """Write the tiny policy with a layer for multi-token prediction (MiMo's), fitted to
    the policy's own text by least squares; its attention is random and weak.
    """
    policy, texts = tiny_policy()
    shape = policy.config
    hidden = []
    embeds = []
    with torch.no_grad():
        for text in texts:
            states: list[torch.Tensor] = []
            hook = policy.model.layers[-1].register_forward_hook(
                lambda *call, to=states: to.append(call[2])
            )
            policy(text)
            hook.remove()
            hidden.append(states[0])
            embeds.append(policy.model.embed_tokens(text))

    size = shape.hidden_size
    kv = shape.hidden_size // 2
    layer = random_layer(size, shape.intermediate_size, kv, 0.02)
    layer |= {
        f"self_attn.{name}_proj.bias": torch.zeros(n)
        for name, n in (("q", size), ("k", kv), ("v", kv))
    }
    layer |= {
        f"{name}layernorm.weight": torch.ones(size)
        for name in ("token_", "hidden_", "input_", "post_attention_")
    }
    layer["final_layernorm.weight"] = policy.model.norm.weight.detach()
    layer["input_proj.weight"] = next_token_reader(
        list(zip(hidden, embeds, strict=True))
    )
    shutil.copytree(POLICY, directory)
    config = json.loads((POLICY / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    weights = load_file(POLICY / "model.safetensors")
    weights |= {f"model.mtp_layers.0.{name}": weight for name, weight in layer.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)
