"""Train the tiny policy of the chained-arithmetic task from scratch, and measure it at
temperature 1.

The policy is a small Qwen2 trained by supervised next-token cross-entropy (on the
response only) on generated solutions.  The demonstrations are deliberately noisy: each
stated result is 10 too low or too high with probability ``--slip``, and replaced by
such a number and a ``~`` with probability ``--guess``.  A sample at temperature 1
therefore is wrong at about that rate per step, although the policy knows the right
result: these are the mistakes that reinforcement learning can remove.  With probability
``--check`` a line is stated twice, which makes lengths differ between samples of one
prompt.  ``--init`` continues from a checkpoint that this script wrote.
"""

import argparse
import json
import platform
import random
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from prepare_data import make_rows
from task import LABELS, MAX_STEPS, compute_score, make_problem, write_solution
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

PAD = "<|pad|>"
END = "<|end|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
UNKNOWN = "<|unk|>"
VOCAB_SIZE = 96
MAX_NEW_TOKENS = 768
BUCKETS = ((1, 2), (3, 4), (5, 7), (8, 12), (13, 20), (21, 34), (35, MAX_STEPS))
BUCKET_WEIGHTS = (1, 3, 4, 3, 2, 2, 2)
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{"
    " '<|assistant|>' + message['content'] + '<|end|>' }}{% else %}{{ '<|user|>' +"
    " message['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{"
    " '<|assistant|>' }}{% endif %}"
)


def make_tokenizer() -> Qwen2Tokenizer:
    """Build the character tokenizer, filled up to ``VOCAB_SIZE`` with reserved tokens.

    It is a Qwen2 tokenizer without merges: whatever a checkpoint says, transformers
    loads that class beside a Qwen2.
    """
    special = [PAD, END, USER, ASSISTANT, UNKNOWN]
    # byte-level names of space and newline
    characters = list("~0123456789+-*>:?#\u0120\u010a" + LABELS)
    special += [
        f"<|reserved_{i}|>" for i in range(VOCAB_SIZE - len(special) - len(characters))
    ]
    vocab = {token: i for i, token in enumerate(special + characters)}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        unk_token=UNKNOWN,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    return tokenizer


def make_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """Build the untrained policy: few and wide layers, 2.8 million parameters."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def make_batch(
    rng: random.Random,
    tokenizer: Qwen2Tokenizer,
    tokens: int,
    slip: float,
    guess: float,
    check: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generate about ``tokens`` tokens of demonstrations of similar length, as input
    ids and labels.
    """
    low, high = rng.choices(BUCKETS, BUCKET_WEIGHTS)[0]
    rows: list[tuple[list[int], list[int]]] = []
    while sum(len(ids) for ids, _ in rows) < tokens:
        problem = make_problem(rng, rng.randint(low, high))
        prompt = tokenizer.encode(f"{USER}{problem}{ASSISTANT}")
        response = tokenizer.encode(
            write_solution(problem, rng, slip, guess, check) + END
        )
        rows.append((prompt + response, [-100] * len(prompt) + response))
    width = max(len(ids) for ids, _ in rows)
    input_ids = [ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in rows]
    labels = [ids + [-100] * (width - len(ids)) for _, ids in rows]
    return torch.tensor(input_ids), torch.tensor(labels)


def train(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, args: argparse.Namespace
) -> float:
    """Train the model in place and return the mean loss of the last 20 steps."""
    rng = random.Random(args.seed)
    matrices = [
        weight for weight in model.model.layers.parameters() if weight.ndim == 2
    ]
    others = [
        weight
        for name, weight in model.named_parameters()
        if weight.ndim != 2 or "layers" not in name
    ]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.01),
        torch.optim.AdamW(
            others, lr=args.lr / 10, betas=(0.9, 0.98), weight_decay=0.01
        ),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda i: min(1.0, (i + 1) / 40, 1.05 - i / args.steps)
        )
        for optimizer in optimizers
    ]
    losses: list[float] = []
    begin = time.time()
    model.train()
    for step in range(args.steps):
        input_ids, labels = make_batch(
            rng, tokenizer, args.batch_tokens, args.slip, args.guess, args.check
        )
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), labels[:, 1:].flatten()
        )
        model.zero_grad()
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        losses.append(loss.item())
        if step % 20 == 19:
            print(
                f"step {step + 1} loss {sum(losses[-20:]) / 20:.4f}"
                f" {time.time() - begin:.0f}s",
                flush=True,
            )
    return sum(losses[-20:]) / len(losses[-20:])


@torch.no_grad()
def sample(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    prompts: list[str],
    temperature: float = 1.0,
) -> list[list[int]]:
    """Sample one response per prompt (greedily at temperature 0); the ids end with the
    end token, if it was reached.
    """
    batch = tokenizer(
        [f"{USER}{prompt}{ASSISTANT}" for prompt in prompts],
        return_tensors="pt",
        padding=True,
    )
    mode = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    output = model.eval().generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        generation_config=GenerationConfig(
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=temperature > 0,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **mode,
        ),
    )
    responses = output[:, batch["input_ids"].shape[1] :].tolist()
    end = tokenizer.eos_token_id
    return [ids[: ids.index(end) + 1] if end in ids else ids for ids in responses]


@torch.no_grad()
def sharpness(
    model: Qwen2ForCausalLM, prompts: list[list[int]], responses: list[list[int]]
) -> torch.Tensor:
    """Return, for each response token, its probability and the entropy (nats) it was
    drawn with: shape (tokens, 2).
    """
    width = max(map(len, prompts)) + max(map(len, responses))
    rows = [prompt + ids for prompt, ids in zip(prompts, responses, strict=True)]
    input_ids = torch.tensor(
        [ids + [model.config.pad_token_id] * (width - len(ids)) for ids in rows]
    )
    logprobs = model(input_ids).logits[:, :-1].log_softmax(-1)
    chosen = logprobs.gather(-1, input_ids[:, 1:, None]).squeeze(-1).exp()
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    spans = [
        slice(len(prompt) - 1, len(ids) - 1)
        for prompt, ids in zip(prompts, rows, strict=True)
    ]
    return torch.cat(
        [
            torch.stack([chosen[i, span], entropy[i, span]], -1)
            for i, span in enumerate(spans)
        ]
    )


def evaluate(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    rows: list[dict[str, Any]],
    samples: int = 8,
    temperature: float = 1.0,
) -> dict[str, float]:
    """Measure accuracy, score, length quantiles and sharpness of ``samples`` responses
    per problem.
    """
    rows = sorted(rows, key=lambda row: row["extra_info"]["difficulty"])
    lengths: list[int] = []
    scores: list[dict[str, float]] = []
    tokens: list[torch.Tensor] = []
    for i in range(0, len(rows), 8):
        group = [row for row in rows[i : i + 8] for _ in range(samples)]
        problems = [row["prompt"][0]["content"] for row in group]
        responses = sample(model, tokenizer, problems, temperature)
        prompts = [
            tokenizer.encode(f"{USER}{problem}{ASSISTANT}") for problem in problems
        ]
        tokens.append(sharpness(model, prompts, responses))
        for row, ids in zip(group, responses, strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            scores.append(
                compute_score(
                    "tiny_math",
                    text,
                    row["reward_model"]["ground_truth"],
                    row["extra_info"],
                )
            )
            lengths.append(len(ids))
    p50, p95 = (
        torch.tensor(lengths, dtype=torch.float)
        .quantile(torch.tensor([0.5, 0.95]))
        .tolist()
    )
    probability, entropy = torch.cat(tokens).mean(0).tolist()
    return {
        "responses": len(scores),
        "acc": round(sum(score["acc"] for score in scores) / len(scores), 4),
        "score": round(sum(score["score"] for score in scores) / len(scores), 4),
        "length_p50": p50,
        "length_p95": p95,
        "length_max": max(lengths),
        "length_mean": round(sum(lengths) / len(lengths), 1),
        "capped": sum(length >= MAX_NEW_TOKENS for length in lengths),
        "token_probability": round(probability, 4),
        "token_entropy": round(entropy, 4),
    }


def main() -> None:
    """Train, save the checkpoint as float16, reload it as float32, measure it and write
    PROVENANCE.json.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="checkpoint directory to write"
    )
    parser.add_argument("--init", type=Path, help="checkpoint directory to start from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--batch-tokens", type=int, default=3072)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--slip", type=float, default=0.1)
    parser.add_argument("--guess", type=float, default=0.0)
    parser.add_argument("--check", type=float, default=0.05)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    if args.init:
        model.load_state_dict(
            Qwen2ForCausalLM.from_pretrained(
                args.init, dtype=torch.float32
            ).state_dict()
        )
    begin = time.time()
    final_loss = train(model, tokenizer, args)
    seconds = time.time() - begin
    model.to(torch.float16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)

    model = Qwen2ForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    train_rows = make_rows("train", 48, 0)
    test_rows = make_rows("test", 32, 0)
    provenance = {
        "command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
        "seed": args.seed,
        "settings": {
            name: value
            for name, value in vars(args).items()
            if name not in ("init", "out")
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "parameters": model.num_parameters(),
        "train_seconds": round(seconds),
        "final_loss": round(final_loss, 4),
        "temperature_1_train": evaluate(model, tokenizer, train_rows),
        "temperature_1_test": evaluate(model, tokenizer, test_rows),
        "greedy_train": evaluate(
            model, tokenizer, train_rows, samples=1, temperature=0.0
        ),
    }
    if args.init:
        provenance["init"] = json.loads((args.init / "PROVENANCE.json").read_text())
    (args.out / "PROVENANCE.json").write_text(json.dumps(provenance, indent=2) + "\n")
    print(json.dumps(provenance, indent=2))


if __name__ == "__main__":
    main()
