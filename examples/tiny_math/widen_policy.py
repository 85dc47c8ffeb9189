"""Write a larger policy with the same logits: the tiny one with every dimension
repeated, and layers that add nothing.

    python examples/tiny_math/widen_policy.py OUT [--width 4] [--layers 24] \
        [--dtype float32] [--drafters DIR]

It is for measurements that need a policy of a few hundred million parameters whose text
is real: its layers are as hard to quantise as the tiny policy's. A repeated input x, x,
... meets weights W/c + E, where E adds up to zero over the c copies and gives every
weight the variance that a layer of that width has.

With `--drafters`, made by make_drafters.py, the EAGLE-3 head is written to OUT/eagle3
for the larger policy: its input layer reads the repeated hidden states. The draft model
needs no change.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

POLICY = Path(__file__).resolve().parent / "policy"
POSITIONS = 16384
"""Longest text that the written config allows: rotary embeddings have no end of their
own.
"""


def widen(
    weight: torch.Tensor,
    out: int,
    copies: int,
    generator: torch.Generator,
    keep: bool = True,
) -> torch.Tensor:
    """Return the weight [out * rows, copies * inputs] of a layer on repeated inputs.

    Args:
        weight: [rows, inputs].
        out: how often each output is repeated.
        copies: how often each input is repeated.
        generator: draws E.
        keep: whether the layer does what it did; False: its output is zero.
    """
    rows, inputs = weight.shape
    noise = (
        torch.randn(out * rows, copies, inputs, generator=generator)
        * weight.std()
        / copies**0.5
    )
    noise -= noise.mean(dim=1, keepdim=True)
    base = weight.repeat(out, 1)[:, None] / copies if keep else 0.0
    return (base + noise).reshape(out * rows, copies * inputs)


@torch.no_grad()
def widened(
    tiny: Qwen2ForCausalLM, width: int, layers: int, seed: int = 0
) -> Qwen2ForCausalLM:
    """Return the larger policy, float32: `width` times the hidden size and heads,
    `layers` layers.
    """
    old = tiny.config
    generator = torch.Generator().manual_seed(seed)
    inner = width + 1  # copies of the MLP's intermediate activations
    config = Qwen2Config(
        **{
            **old.to_dict(),
            "layer_types": None,
            "hidden_size": width * old.hidden_size,
            "intermediate_size": inner * old.intermediate_size,
            "num_hidden_layers": layers,
            "num_attention_heads": width * old.num_attention_heads,
            "num_key_value_heads": width * old.num_key_value_heads,
            "max_position_embeddings": POSITIONS,
        }
    )
    model = Qwen2ForCausalLM(config)
    every = layers // old.num_hidden_layers
    state = {}
    for i in range(layers):
        source = tiny.model.layers[min(i // every, old.num_hidden_layers - 1)]
        real = i % every == 0 and i // every < old.num_hidden_layers
        at = f"model.layers.{i}."
        for name, parameter in source.named_parameters():
            if parameter.ndim == 1:
                state[at + name] = parameter.repeat(width)
            elif "down_proj" in name:
                state[at + name] = widen(parameter, width, inner, generator, real)
            elif "o_proj" in name:
                state[at + name] = widen(parameter, width, width, generator, real)
            else:
                out = inner if "gate" in name or "up" in name else width
                state[at + name] = widen(parameter, out, width, generator)
    state["model.norm.weight"] = tiny.model.norm.weight.repeat(width)
    state["model.embed_tokens.weight"] = tiny.model.embed_tokens.weight.repeat(1, width)
    state["lm_head.weight"] = widen(tiny.lm_head.weight, 1, width, generator)
    model.load_state_dict(state)
    return model


def widen_head(
    source: Path, out: Path, tiny: Qwen2ForCausalLM, width: int, layers: int
) -> None:
    """Write the EAGLE-3 head of the tiny policy for the larger one."""
    hidden = tiny.config.hidden_size
    every = layers // tiny.config.num_hidden_layers
    state = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    # [hidden, layers read, 1, hidden]
    fused = state["fc.weight"].unflatten(1, (-1, 1, hidden))
    state["fc.weight"] = (fused / width).repeat(1, 1, width, 1).flatten(1)
    state["embed_tokens.weight"] = tiny.model.embed_tokens.weight.detach().clone()
    read = [layer * every for layer in config["eagle_aux_hidden_state_layer_ids"]]
    config |= {
        "target_hidden_size": width * hidden,
        "eagle_aux_hidden_state_layer_ids": read,
    }
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = read
    out.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: t.bfloat16().contiguous() for name, t in state.items()},
        out / "model.safetensors",
    )
    (out / "config.json").write_text(
        json.dumps(config | {"torch_dtype": "bfloat16"}, indent=2) + "\n"
    )


def main() -> None:
    """Write the larger policy, and its head where there are drafters."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--drafters", type=Path)
    args = parser.parse_args()
    tiny = Qwen2ForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    model = widened(tiny, args.width, args.layers)
    ids = torch.arange(2, 90)[None]
    error = (model(ids).logits - tiny(ids).logits).abs().max().item()
    print(
        f"{model.num_parameters() / 1e6:.0f} M parameters; logits differ by at most"
        f" {error:.1e} in float32"
    )
    model.to(getattr(torch, args.dtype)).save_pretrained(args.out)
    AutoTokenizer.from_pretrained(POLICY).save_pretrained(args.out)
    if args.drafters:
        widen_head(
            args.drafters / "eagle3", args.out / "eagle3", tiny, args.width, args.layers
        )


if __name__ == "__main__":
    main()
