"""Drafts that end where their model is no longer sure, against drafts whose tokens all
count alike, and against one length for all: on the V2 runner, in simulated H100 steps.

python benchmarks/v2_confidence.py --drafters DIRECTORY --out FILE.json

DIRECTORY is that of `examples/tiny_math/make_drafters.py`. Which tokens of a drafter
are accepted, and how sure it was of each, is recorded: texts that the tiny policy
writes, drafted with the noise that they were drawn with. Responses of the long-tailed
lengths of `v2_lengths.py` are made of these texts, one after another. The host's part
is the engine's own, and a step takes what the roofline says of the policy's shape; a
pass of the drafter takes what it says of one of the policy's layers and its head.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import torch
from modelled import MEDIAN, PROMPT, DraftedText, EngineWithModel, Record
from noise_acceptance import copied
from provenance import provenance, save
from transformers import AutoModelForCausalLM
from v2_lengths import ROLLOUTS, plain

from das_adapter.core.confidence import EVEN, KINDS
from das_adapter.core.hardware import DEVICES
from das_adapter.core.latency import StepModel
from das_adapter.core.roofline import Roofline
from das_adapter.sim.models import sizes

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "contract"))
from jobs import POLICY
from requested import prompts

QUEUE = 6
ARMS = ("one", "alike", "own")


@torch.inference_mode()
def record(
    drafters: Path, texts: int, tokens: int, temperature: float
) -> dict[str, list[Record]]:
    """Return what each drafter makes of texts that the policy writes."""
    policy = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    models = {
        "draft_model": AutoModelForCausalLM.from_pretrained(
            drafters / "draft_model", dtype=torch.float32
        )
    }
    models["self_int4"] = copied(policy, "int4")
    torch.manual_seed(0)
    found: dict[str, list[Record]] = {name: [] for name in models}
    for prompt in prompts(texts):
        ids = torch.tensor([prompt])
        noise = -torch.log(torch.empty(tokens, 96).exponential_())
        cache = None
        text = list[int]()
        read = ids
        for drawn in noise:
            step = policy(read, past_key_values=cache, use_cache=True)
            text.append(int((step.logits[0, -1] / temperature + drawn).argmax()))
            cache = step.past_key_values
            read = torch.tensor([text[-1:]])
            if text[-1] == policy.config.eos_token_id:
                break
        whole = torch.cat([ids, torch.tensor([text])], dim=1)
        written = torch.tensor(text)
        for name, model in models.items():
            q = model(whole).logits[0, len(prompt) - 1 : -1] / temperature
            drafted = (q + noise[: len(text)]).argmax(dim=1)
            chance = (
                q.double()
                .softmax(dim=1)
                .gather(1, drafted[:, None])[:, 0]
                .clamp(1e-12, 1 - 1e-12)
            )
            kinds = (torch.log2(chance / (1 - chance)).floor() + EVEN).clamp(
                0, KINDS - 1
            )
            found[name].append(
                (kinds.numpy().astype(np.uint8), (drafted == written).numpy())
            )
    return found


def engine(arm: str, model: StepModel, one_pass: StepModel) -> EngineWithModel:
    """Return the engine of an arm."""
    return EngineWithModel(arm != "one", arm == "own", model, one_pass)


def synchronous(
    arm: str,
    requests: int,
    records: Sequence[Record],
    model: StepModel,
    one_pass: StepModel,
) -> float:
    """Return the time of rollouts whose requests begin together, as a share of
    off's.
    """
    rng = np.random.default_rng(requests)
    modelled = engine(arm, model, one_pass)
    rollouts = [
        [DraftedText(rng, records) for _ in range(requests)] for _ in range(ROLLOUTS)
    ]
    took = [modelled.rollout(number, texts) for number, texts in enumerate(rollouts)]
    return sum(took[1:]) / sum(plain(texts, model) for texts in rollouts[1:])


def asynchronous(
    arm: str,
    requests: int,
    records: Sequence[Record],
    model: StepModel,
    one_pass: StepModel,
) -> float:
    """Return the time of a token where a request takes the place of each that ends, as
    a share of off's. Of those that begin together a part is written already.
    """
    rng = np.random.default_rng(requests)
    modelled = engine(arm, model, one_pass)
    rollouts = [
        [DraftedText(rng, records) for _ in range(QUEUE * requests)] for _ in range(2)
    ]
    for text in (text for texts in rollouts for text in texts[:requests]):
        text.length = int(rng.integers(1, text.length + 1))
    took = [
        modelled.rollout(number, texts, requests, to_the_end=False)
        for number, texts in enumerate(rollouts)
    ]
    off = model.step(requests, requests, False) / requests
    return took[1] / sum(text.at for text in rollouts[1]) / off


@click.command()
@click.option("--drafters", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--texts", default=64, show_default=True)
@click.option("--tokens", default=300, show_default=True, help="Most tokens of a text.")
@click.option("--temperature", multiple=True, type=float, default=(1.0, 1.5))
@click.option("--requests", multiple=True, type=int, default=(1, 8, 64, 256))
@click.option("--policy", default="Qwen/Qwen2.5-7B")
@click.option("--gpu", default="h100")
@click.option("--out", type=click.Path(path_type=Path))
def main(
    drafters: Path,
    texts: int,
    tokens: int,
    temperature: tuple[float, ...],
    requests: tuple[int, ...],
    policy: str,
    gpu: str,
    out: Path | None,
) -> None:
    """Write a row for each temperature, drafter and batch."""
    shape = sizes(policy)
    rows = []
    whole, part = (
        Roofline.from_config({**shape, "num_hidden_layers": layers}, DEVICES[gpu])
        .step_model()
        .at_context(PROMPT + MEDIAN)
        for layers in (shape["num_hidden_layers"], 1)
    )
    for heat in temperature:
        for name, records in record(drafters, texts, tokens, heat).items():
            accepted = float(np.concatenate([right for _, right in records]).mean())
            for count in requests:
                for workload in (synchronous, asynchronous):
                    row = {
                        "drafter": name,
                        "temperature": heat,
                        "accepted": accepted,
                        "requests": count,
                    }
                    row |= {"workload": workload.__name__}
                    row |= {
                        arm: workload(arm, count, records, whole, part) for arm in ARMS
                    }
                    rows.append(row)
                    print(row, flush=True)
    if out is not None:
        save(
            out,
            {
                "provenance": provenance(),
                "policy": policy,
                "gpu": gpu,
                "time_of_off": rows,
            },
        )


if __name__ == "__main__":
    main()
