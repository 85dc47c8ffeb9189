"""das-adapter inside one vLLM worker, on either model runner: the calls that the host
can make, the counts, and what an engine without a host does itself.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from das_adapter import __version__
from das_adapter.config import DasConfig
from das_adapter.engine.alone import Standalone
from das_adapter.engine.draft_weights import DraftWeights, see_weight_stream
from das_adapter.engine.failures import log_failure
from das_adapter.engine.policy_copy import PolicyCopy
from das_adapter.engine.recurrent import (
    recurrent_layers,
    refuse_layers,
    state_bytes,
    tell_memory,
)
from das_adapter.engine.requests import LiveRequest
from das_adapter.errors import DasError
from das_adapter.patching import patch
from das_adapter.protocol.messages import Refresh, Refreshed, to_plain_payload
from das_adapter.protocol.metrics import Counters, EngineStats

logger = logging.getLogger("das_adapter")


@dataclass
class Seen:
    """Figures of a rehearsal's drafts, as a worker has seen them."""

    asked: bool = False
    """Whether the controller's plan came with a step of vLLM's scheduler; True where no
    plan travels.
    """
    verified: int = 0
    """Draft tokens that the policy has verified."""
    accepted: int = 0
    """Draft tokens that were accepted."""


class WorkerState:
    """The state of one worker. `call` is reached from the host by
    `collective_rpc("das_rpc", (command, payload))`.
    """

    model_runner: int
    """Version of vLLM's model runner: 1 or 2."""

    def __init__(
        self,
        runner: Any,
        config: DasConfig,
        drafter: Any,
    ):
        """`drafter`: what decides on the drafts, the runner's `Proposer` or
        `StepPlanner`; None: vLLM does, or another rank's, or nobody drafts.
        """
        self.runner = runner
        self.config = config
        self._decides = drafter
        self.counters = Counters()
        if drafter is not None:
            self.counters = drafter.engine.counters
        self.draft_weights: DraftWeights | None = None
        if config.neural:
            self.draft_weights = DraftWeights(runner, config)
        self.standalone: Standalone | None = None
        """Does here what a host does elsewhere; None: there is a host."""
        self.rehearsal: Seen | None = None
        """Figures of the rehearsal that is going on; None: none is."""
        self.gave_up = False
        """Whether nothing will be drafted in this engine, weight sync or not."""

    @property
    def plans_travel(self) -> bool:
        """Whether the controller's plan comes back with a step of vLLM's scheduler."""
        return False

    @property
    def copy(self) -> PolicyCopy | None:
        """The policy copy that drafts; None: none does."""
        if not self.config.copies_policy:
            return None
        source = getattr(self.runner, "speculator", None)
        if not source:
            source = self.runner.drafter.model_source
        copy: PolicyCopy = source.copy
        return copy

    def response(self, req_id: str) -> LiveRequest | None:
        """Return a request that is over, with its text; None: it is not known."""
        raise NotImplementedError

    def bind(self) -> None:
        """Bind it to the model runner."""
        follow_loaded_models.apply(self.loaded, owner=self.runner)

    def stand_alone(self, worker: Any, directory: str) -> None:
        """Let the engine look after its own history, which has this name on the node:
        no host does.
        """
        self.standalone = Standalone(self, directory)
        self._worker = worker

    def loaded(self) -> None:
        """Take over what vLLM has just loaded: the policy, and a drafter with
        weights. ConfigError: the policy has recurrent layers beside which no drafts can
        stand.
        """
        layers = recurrent_layers(self.runner.vllm_config)
        if layers and self.config.drafter != "none":
            refuse_layers(self.config, layers)
            tell_memory(self.runner.vllm_config, state_bytes(layers))
        if self.draft_weights:
            self.draft_weights.follow_drafter()
        if self.draft_weights or self.standalone:
            see_weight_stream.apply(self.load_weights, owner=self.runner.get_model())

    def load_weights(
        self,
        stock: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Load the weights of a trainer's stream into the policy, with `stock`, and
        into the drafter.
        """
        load = stock
        if self.draft_weights:
            load = functools.partial(self.draft_weights.load, stock)
        result = load(*args, **kwargs)
        if self.standalone:
            self.standalone.weights_changed()
        return result

    def begin_standalone(self, scheduled: Any) -> None:
        """Note that a step begins (vLLM's `SchedulerOutput`), in an engine without a
        host.
        """
        if self.standalone and self.rehearsal is None:
            updating = getattr(self._worker, "_weight_update_active", False)
            try:
                self.standalone.begin_step(scheduled, updating)
            except Exception as error:
                logger.exception(
                    "das: the engine was not brought up to date; decoding goes on"
                    " without drafts"
                )
                self.fail(error)

    def call(self, command: str, payload: dict[str, Any]) -> Any:
        """Run a command of the host: `hello`, `refresh`, `map_guest_history` or
        `stats`; or of the engine's core: `rehearse`, `rehearsed` or `give_up`. Raises
        only for an unknown command: a worker that raises during a weight sync would
        leave the trainer waiting for ever.
        """
        commands: dict[str, Callable[..., Any]] = {
            "hello": self._hello,
            "refresh": self._refresh,
            "map_guest_history": self.map_guest_history,
            "stats": self._stats,
            "rehearse": self.rehearse,
            "rehearsed": self.rehearsed,
            "give_up": self.give_up,
        }
        if command not in commands:
            raise DasError(
                f"das_rpc: found command {command!r}, allowed: {', '.join(commands)}"
            )
        try:
            return to_plain_payload(commands[command](**payload))
        except Exception as error:
            logger.exception("das: %s failed; decoding goes on without drafts", command)
            self.fail(error)
            return Refreshed(error=repr(error))

    def refresh(self, message: Refresh) -> Refreshed:
        """Bring everything up to date that depends on the weights or on the history."""
        answer = Refreshed()
        if self._decides is not None:
            answer = self._decides.refresh(message)
        if not self.gave_up:
            self._draft_again()
            if self._decides is None:  # else it has begun anew itself
                self.counters.error = None
        if self.copy is not None:
            self.copy.quantise()
        if self.draft_weights is None:
            self.counters.alarm = None
        elif self.standalone is None or self.standalone.synced:
            self.counters.alarm = self.draft_weights.refresh()
            if self.counters.alarm:
                logger.error("das: %s", self.counters.alarm)
        return answer

    def map_guest_history(self, files: list[str]) -> None:
        """Map the history of problems that are at home on other nodes."""
        if self._decides is not None:
            self._decides.map_guest_history(files)

    def own_stats(self) -> EngineStats:
        """Return the figures of what stands in the device's memory."""
        copy = self.copy
        return EngineStats() if copy is None else copy.stats()

    def rehearse(self) -> None:
        """Draft in every step from now on, for the request with which the engine tries
        its drafts.
        """
        self.rehearsal = Seen(asked=not self.plans_travel)
        if self._decides is not None:
            self._decides.engine.rehearse()

    def rehearsed(self) -> dict[str, Any]:
        """End the rehearsal; return what was seen of its drafts, and the error that
        ended them, None: none did. What only some ranks see, the others give as
        None.
        """
        seen = self.rehearsal or Seen()
        self.rehearsal = None
        error = self.counters.error
        if self._decides is not None:
            self._decides.rehearsed()
        return {**vars(seen), "error": error}

    def give_up(self, error: str) -> None:
        """Draft no more in this engine, weight sync or not: the rehearsal has shown
        that drafts can't arrive.
        """
        self.gave_up = True
        self._draft_no_more()
        if self._decides is not None:
            self._decides.engine.give_up(error)
        self.counters.error = error

    def fail_in_step(self, error: Exception) -> None:
        """Draft no more until the next weight sync, where vLLM's own part of a step has
        failed with drafts: it verifies none any more.
        """
        self._draft_no_more()
        self.fail(error)

    def fail(self, error: Exception) -> None:
        """Draft no more until the next weight sync, and say so once."""
        if self._decides is not None:
            self._decides.engine.fail(error)
        elif self.counters.error is None:
            self.counters.error = repr(error)
            if self.rehearsal is None:
                log_failure(
                    error, self.config.drafter, "no drafts until the next weight sync"
                )

    @contextlib.contextmanager
    def surviving(self) -> Iterator[None]:
        """Go on without drafts where what is done inside fails."""
        try:
            yield
        except Exception as error:
            self.fail(error)

    def _draft_no_more(self) -> None:
        """Take the drafter out of the runner's steps, as far as that is not the
        controller's part.
        """

    def _draft_again(self) -> None:
        """Put the drafter back into the runner's steps, at a weight sync."""

    def _hello(self) -> dict[str, str]:
        return {
            "version": __version__,
            "drafter": self.config.drafter,
            "sampler": type(self.runner.sampler).__name__,
            "runner": f"V{self.model_runner}",
        }

    def _refresh(self, **payload: Any) -> Refreshed:
        # whoever calls keeps no history; all that it may say is: now
        if self.standalone:
            if payload:
                found = ", ".join(payload)
                return Refreshed(
                    error=f"refresh: found {found}, allowed without a host: no"
                    " arguments"
                )
            self.standalone.weights_changed()
            return Refreshed()
        return self.refresh(Refresh(**payload))

    def _stats(self) -> EngineStats:
        if self._decides is None:
            stats = self.counters.read_and_reset()
        else:
            stats = self._decides.stats() | self.own_stats()
        stats["model_runner"] = self.model_runner
        if self.standalone:
            stats |= self.standalone.stats()
        return stats


@patch("vllm.v1.worker.gpu_model_runner:GPUModelRunner.load_model", since="0.24")
def follow_loaded_models(stock: Any, loaded: Callable[[], None]) -> Any:
    """Without it nobody sees the weights that a trainer loads into the policy, and a
    drafter's weights are neither synced nor checked (on either model runner; vLLM loads
    the drafter after the policy). Remove this patch when vLLM tells plug-ins that its
    weights were updated, and keeps those of a drafter.
    """
    return then(stock, loaded)


def then(stock: Any, changed: Callable[[], None]) -> Any:
    """Return a function that calls `stock`, and then tells that something has
    changed.
    """

    def update(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        changed()
        return result

    return update
