"""The rollouts' figures in veRL's own logger."""

from __future__ import annotations

from typing import Any

from das_adapter.verl import settings


def around_init(stock: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrap `Tracking.__init__(project_name, experiment_name, default_backend, config)` to read the `das:` block."""
    config = kwargs.get("config", args[3] if len(args) > 3 else None)
    instance._das = settings.of_run(config)
    return stock(*args, **kwargs)


def around_log(stock: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wrap `Tracking.log(data, step, backend)` to add the step's figures to the trainer's."""
    if getattr(instance, "_das", None) is None:
        return stock(*args, **kwargs)
    from das_adapter.service import ledger, session

    given = {**dict(zip(("data", "step", "backend"), args, strict=False)), **kwargs}
    data, step = given["data"], given["step"]
    if any(key.startswith(("actor/", "critic/")) for key in data):  # of training, not of a validation or a sync
        exposed = exposed_generation(data)
        for waited in exposed.values():
            session.note_wait(instance._das, step, waited)
        given["data"] = {**data, **exposed, **_under_both_names(ledger.metrics(step))}
    return stock(**given)


_WAITS = ("timing_s/gen", "timing_s/switch_wait")
"""What veRL's trainers call the time in which they wait for rollouts: all of it where rollout and training alternate,
what training does not hide where they overlap; the second only where engines are lent to the rollout."""


def exposed_generation(data: dict[str, Any]) -> dict[str, float]:
    """Return how long training waited for rollouts in this step (NeMo-RL's paper, section 3.3), where veRL says."""
    waits = [float(data[name]) for name in _WAITS if name in data]
    return {"das/exposed_generation_s": sum(waits)} if waits else {}


def _under_both_names(figures: dict[str, float]) -> dict[str, float]:
    """Return the figures; those for which veRL has names of its own are there under both names."""
    if not figures:
        return figures
    drafted, accepted = figures["das/draft_tokens"], figures["das/accepted_tokens"]
    return {
        **figures,
        "rollout/spec_accept_rate": accepted / max(1.0, drafted),
        "rollout/spec_accept_length": figures["das/acceptance_length"],
        "rollout/spec_num_draft_tokens": drafted,
        "rollout/spec_num_accepted_tokens": accepted,
        "rollout/spec_num_verify_steps": figures["das/drafts"],
    }
