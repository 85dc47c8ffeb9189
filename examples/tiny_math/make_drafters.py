"""Train the tiny policy's neural drafters: a draft model and an EAGLE-3 head, about a
minute on two cores.

    python examples/tiny_math/make_drafters.py OUT [--steps 120] [--tokens 2048] \
        [--policy CHECKPOINT] [--rows ROWS]

Writes OUT/draft_model and OUT/eagle3, as vLLM's methods `draft_model` and `eagle3` read
them. Both learn the policy's next-token distribution on demonstrations, or on responses
that `das-adapter history export` has written to ROWS (cross entropy against its logits;
NeMo-RL's draft loss, arXiv 2604.26779).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import datasets
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from train_policy import make_batch
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)

POLICY = Path(__file__).resolve().parent / "policy"
AUX = (1, 2, 3)
"""Layers of the policy whose outputs the EAGLE-3 head reads."""
POSITIONS = 4096
"""Longest text that the written configs allow: rotary embeddings have no end of their
own.
"""


class Eagle3(nn.Module):
    """An EAGLE-3 head (arXiv 2503.01840): one decoder layer over the embedding of the
    next token and the fused hidden states of the policy. Names are those of its
    published checkpoints.
    """

    def __init__(
        self, hidden: int, heads: int, kv_heads: int, vocab: int, inner: int = 256
    ):
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads
        self.size = hidden // heads
        self.fc = nn.Linear(len(AUX) * hidden, hidden, bias=False)
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        self.midlayer = nn.ModuleDict(
            {name: nn.RMSNorm(hidden, eps=1e-6) for name in norms}
        )
        self.midlayer["self_attn"] = nn.ModuleDict(
            {
                "q_proj": nn.Linear(2 * hidden, heads * self.size, bias=False),
                "k_proj": nn.Linear(2 * hidden, kv_heads * self.size, bias=False),
                "v_proj": nn.Linear(2 * hidden, kv_heads * self.size, bias=False),
                "o_proj": nn.Linear(heads * self.size, hidden, bias=False),
            }
        )
        self.midlayer["mlp"] = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, inner, bias=False),
                "up_proj": nn.Linear(hidden, inner, bias=False),
                "down_proj": nn.Linear(inner, hidden, bias=False),
            }
        )
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits, and the hidden state that the next draft step reads.

        Args:
            embeds: embeddings of the next tokens, [batch, length, hidden].
            hidden: hidden states, [batch, length, hidden].
        """
        layer = self.midlayer
        attention = self.midlayer["self_attn"]
        mlp = self.midlayer["mlp"]
        x = torch.cat(
            [layer["input_layernorm"](embeds), layer["hidden_norm"](hidden)], dim=-1
        )
        q, k, v = (
            attention[f"{name}_proj"](x)
            .unflatten(-1, (count, self.size))
            .transpose(1, 2)
            for name, count in (
                ("q", self.heads),
                ("k", self.kv_heads),
                ("v", self.kv_heads),
            )
        )
        y = F.scaled_dot_product_attention(
            rotate(q), rotate(k), v, is_causal=True, enable_gqa=True
        )
        hidden = hidden + attention["o_proj"](y.transpose(1, 2).flatten(-2))
        x = layer["post_attention_layernorm"](hidden)
        hidden = hidden + mlp["down_proj"](
            F.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x)
        )
        return self.lm_head(self.norm(hidden)), hidden

    def drafts(
        self, states: Sequence[torch.Tensor], embeds: torch.Tensor, steps: int
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the number and the logits of each draft step, over texts that the
        policy has read. Row i of step n is for token i + n + 1, as row i + n of the
        policy's own logits; later steps read the head's own hidden states.

        Args:
            states: the policy's hidden states by layer, [batch, length, hidden] each;
                those of layer 0 are its embeddings.
            embeds: the policy's embeddings, [batch, length, hidden].
            steps: number of draft steps.
        """
        hidden = self.fc(torch.cat([states[i] for i in AUX], dim=-1))
        for ahead in range(1, steps + 1):
            logits, hidden = self(
                embeds[:, ahead:], hidden[:, : embeds.shape[1] - ahead]
            )
            yield ahead, logits[:, :-1]


def head_for(policy: Qwen2ForCausalLM) -> Eagle3:
    """Make a new head, of the policy's shape."""
    shape = policy.config
    return Eagle3(
        shape.hidden_size,
        shape.num_attention_heads,
        shape.num_key_value_heads,
        shape.vocab_size,
    )


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Apply rotary position embeddings, base 10000, to x [batch, heads, length,
    size].
    """
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    a = x[..., :half]
    b = x[..., half:]
    return torch.cat(
        [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1
    )


def loss(
    student: torch.Tensor, teacher: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return the mean cross entropy of logits [batch, length, vocab] against the
    policy's, over the tokens where the mask [batch, length] is 1.
    """
    cross_entropy = -(teacher.softmax(-1) * student.log_softmax(-1)).sum(-1)
    return (cross_entropy * mask).sum() / mask.sum()


Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""Token ids, int64 [batch, length], and 1.0 on tokens of responses, float32 of the same
shape. They do not end.
"""


def demonstrations(
    tokenizer: PreTrainedTokenizerBase, tokens: int, rng: random.Random
) -> Batches:
    """Yield batches of about so many tokens of generated solutions."""
    while True:
        ids, labels = make_batch(rng, tokenizer, tokens, 0.0, 0.1, 0.05)
        yield ids, (labels >= 0).float()


def exported(rows: Path, padding: int, tokens: int, rng: random.Random) -> Batches:
    """Yield batches of about so many tokens of exported responses of similar length."""
    table = datasets.load_from_disk(rows).sort("seq_len").with_format("torch")
    texts = [(row["input_ids"].long(), row["loss_mask"].float()) for row in table]
    groups = []
    first = 0
    for last, (ids, _) in enumerate(texts):
        if (last + 1 - first) * len(ids) >= tokens or last + 1 == len(texts):
            groups.append(texts[first : last + 1])
            first = last + 1
    while True:
        for group in rng.sample(groups, len(groups)):
            all_ids, all_masks = zip(*group, strict=True)
            yield (
                pad_sequence(all_ids, batch_first=True, padding_value=padding),
                pad_sequence(all_masks, batch_first=True),
            )


def main() -> None:
    """Train both drafters, and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--tokens", type=int, default=2048, help="of a step's batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", type=Path, default=POLICY)
    parser.add_argument("--rows", type=Path, help="of `das-adapter history export`")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    begin = time.time()
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    policy = Qwen2ForCausalLM.from_pretrained(args.policy, dtype=torch.float32).eval()
    if args.rows:
        batches = exported(args.rows, tokenizer.pad_token_id, args.tokens, rng)
    else:
        batches = demonstrations(tokenizer, args.tokens, rng)
    shape = policy.config
    smaller = {
        "layer_types": None,
        "num_hidden_layers": 2,
        "max_position_embeddings": POSITIONS,
    }
    small = Qwen2ForCausalLM(Qwen2Config(**{**shape.to_dict(), **smaller}))
    # its first layers, embeddings, norm and head
    small.load_state_dict(policy.state_dict(), strict=False)
    head = head_for(policy)
    head.lm_head.weight.data.copy_(policy.lm_head.weight)
    head.norm.weight.data.copy_(policy.model.norm.weight)
    head.fc.weight.data[:, -shape.hidden_size :] += torch.eye(shape.hidden_size)
    trained = [*small.parameters(), *head.parameters()]
    optimizers = [
        torch.optim.Muon(
            [p for p in small.model.layers.parameters() if p.ndim == 2],
            lr=0.01,
            weight_decay=0.0,
        ),
        torch.optim.AdamW(head.parameters(), lr=3e-3),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda i: min(1.0, 1.05 - i / args.steps))
        for o in optimizers
    ]
    for step in range(args.steps):
        ids, on_response = next(batches)
        with torch.no_grad():
            teacher = policy(ids, output_hidden_states=True)
            embeds = policy.model.embed_tokens(ids)
        mask = on_response[:, 1:]
        small_loss = loss(small(ids).logits[:, :-1], teacher.logits[:, :-1], mask)
        head_loss = torch.zeros(())
        for ahead, logits in head.drafts(teacher.hidden_states, embeds, 2):
            head_loss = head_loss + loss(
                logits, teacher.logits[:, ahead:-1], mask[:, ahead:]
            )
        for parameter in trained:
            parameter.grad = None
        (small_loss + head_loss).backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step % 20 == 19:
            print(
                f"step {step + 1} losses {small_loss:.3f} {head_loss / 2:.3f}"
                f" {time.time() - begin:.0f} s",
                flush=True,
            )

    small.save_pretrained(args.out / "draft_model")
    tokenizer.save_pretrained(args.out / "draft_model")
    (args.out / "eagle3").mkdir(parents=True, exist_ok=True)
    save_file(
        {k: v.contiguous() for k, v in head.state_dict().items()},
        args.out / "eagle3" / "model.safetensors",
    )
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.vocab_size,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": shape.eos_token_id,
        "pad_token_id": shape.pad_token_id,
        "torch_dtype": "float32",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(AUX),
            "use_aux_hidden_state": True,
        },
        "eagle_aux_hidden_state_layer_ids": list(AUX),
    }
    (args.out / "eagle3" / "config.json").write_text(
        json.dumps(config, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
