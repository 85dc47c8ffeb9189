"""How often a model's draft token is accepted: drawn with the policy's own Gumbel noise
(`verify.noise: keyed`), beside the sum of min(p, q), as which rejection sampling
accepts what is drawn from the model's probabilities (`stock`), and how often it would
accept the model's most likely token.

python benchmarks/noise_acceptance.py --drafters DIRECTORY --out FILE.json

DIRECTORY is that of `examples/tiny_math/make_drafters.py`. The chances are computed,
not drawn, at each position of texts that the tiny policy writes at temperature 1. With
one noise both draw token x with probability 1 / sum over y of max(p(y) / p(x), q(y) /
q(x)).
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import click
import torch
from provenance import provenance, save
from transformers import AutoModelForCausalLM

from das_adapter.engine.quantised import quantised

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "contract"))
from jobs import POLICY
from requested import prompts

COPIES = ("int4", "int8")


def copied(policy: torch.nn.Module, weights: str) -> torch.nn.Module:
    """Return the policy with quantised linear layers, but for the head."""
    twin = copy.deepcopy(policy)
    for name, layer in twin.named_modules():
        if isinstance(layer, torch.nn.Linear) and "lm_head" not in name:
            weight = quantised(layer.weight.detach(), weights)
            bias = layer.bias
            layer.forward = lambda x, w=weight, b=bias: (
                w.linear(x) if b is None else w.linear(x) + b
            )  # type: ignore[method-assign]
    return twin


def chances(p: torch.Tensor, q: torch.Tensor) -> tuple[float, float, float]:
    """Return the chance that both draw one token with one noise, the sum of min(p, q),
    and p of the token of the largest q, of distributions float64 [positions,
    vocabulary], on average.
    """
    shared = [
        1.0 / torch.maximum(p / p[:, [x]], q / q[:, [x]]).sum(dim=1)
        for x in range(p.shape[1])
    ]
    most_likely = p.gather(1, q.argmax(dim=1, keepdim=True))
    return (
        float(torch.stack(shared).sum(dim=0).mean()),
        float(torch.minimum(p, q).sum(dim=1).mean()),
        float(most_likely.mean()),
    )


@torch.inference_mode()
def measure(drafters: Path, samples: int, tokens: int) -> dict[str, Any]:
    """Return the chances of each model, and the positions."""
    policy = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    models = {f"self_{weights}": copied(policy, weights) for weights in COPIES}
    models["draft_model"] = AutoModelForCausalLM.from_pretrained(
        drafters / "draft_model", dtype=torch.float32
    )
    torch.manual_seed(0)
    p = list[torch.Tensor]()
    q = {name: list[torch.Tensor]() for name in models}
    for prompt in prompts(samples):
        ids = torch.tensor([prompt])
        text = policy.generate(
            ids, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=tokens
        )
        for model, found in (
            (policy, p),
            *((model, q[name]) for name, model in models.items()),
        ):
            found.append(
                model(text).logits[0, len(prompt) - 1 : -1].double().softmax(dim=-1)
            )
    of_policy = torch.cat(p)
    result = {}
    for name, found in q.items():
        keyed, stock, most_likely = chances(of_policy, torch.cat(found))
        result[name] = {
            "keyed": keyed,
            "stock": stock,
            "ratio": keyed / stock,
            "most_likely": most_likely,
        }
    return {"positions": len(of_policy), "drafters": result}


@click.command()
@click.option("--drafters", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--texts", default=64, show_default=True)
@click.option("--tokens", default=100, show_default=True, help="Most tokens of a text.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the figures here.")
def main(drafters: Path, texts: int, tokens: int, out: Path | None) -> None:
    """Compute the chances of policy copies and a draft model."""
    result = measure(drafters, texts, tokens)
    for name, found in result["drafters"].items():
        click.echo(
            f"{name}: one noise {found['keyed']:.4f}, sum of min(p, q)"
            f" {found['stock']:.4f}, most likely token {found['most_likely']:.4f}"
        )
    if out:
        save(out, {"provenance": provenance(), **result})


if __name__ == "__main__":
    main()
