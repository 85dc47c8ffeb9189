"""das-adapter inside one vLLM worker, on either model runner: the calls that the host can make, the counts, and what an
engine without a host does itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from das_adapter import __version__
from das_adapter.config import DasConfig
from das_adapter.core.account import collapsed
from das_adapter.engine.controller import EngineController
from das_adapter.engine.draft_weights import DraftWeights
from das_adapter.engine.standalone.weights import (
    follow_loaded_policy,
    see_finished_update,
    see_loaded_weights,
    see_reloaded_weights,
)
from das_adapter.engine.standalone.worker import Response, Standalone
from das_adapter.engine.timing import without_graphs
from das_adapter.errors import DasError
from das_adapter.protocol.decision_log import Counts
from das_adapter.protocol.messages import Refresh, Refreshed, Started, plain
from das_adapter.protocol.metrics import Counters, EngineStats

logger = logging.getLogger("das_adapter")


class Drafter(Protocol):
    """What decides on the drafts of a runner: `v1.proposer.Proposer`, `v2.lengths.DraftLengths`."""

    engine: EngineController

    def refresh(self, message: Refresh) -> Refreshed: ...

    def visit(self, files: Sequence[str]) -> Refreshed: ...

    def stats(self) -> EngineStats: ...


class WorkerState:
    """The state of one worker. `call` is reached from the host by `collective_rpc("das_rpc", (command, payload))`."""

    model_runner: int
    """vLLM's: 1 or 2."""
    ranks_draft_alike: bool
    """Whether each tensor-parallel rank has the history, and all must have the same."""

    def __init__(self, runner: Any, config: DasConfig, drafter: Drafter | None, harvests: bool):
        """
        Args:
            drafter: None: vLLM's decides, or another rank's, or nobody drafts.
            harvests: whether this rank has a part in the history of an engine without a host.
        """
        self.runner, self.config, self._decides = runner, config, drafter
        self.counters = Counters() if drafter is None else drafter.engine.counters
        self.draft_weights = DraftWeights(runner, config) if config.neural else None
        self.standalone: Standalone | None = None
        """Does here what a host does elsewhere; None: there is a host."""
        self._harvests = harvests
        self._updating: Callable[[], bool] = lambda: False
        """Whether weights are being updated."""

    def response(self, req_id: str) -> Response | None:
        """Return what a request has written that is over; None: it is not known."""
        raise NotImplementedError

    def stand_alone(self, worker: Any, directory: str) -> None:
        """Let the engine look after its own history, which has this name on the node: no host does."""
        if not self._harvests:
            return
        self.standalone = own = Standalone(self, directory)

        def loaded() -> None:
            if self.draft_weights:
                self.draft_weights.loaded = own.weights_changed
            else:
                see_loaded_weights.apply(own.weights_changed, owner=self.runner.get_model())

        follow_loaded_policy.apply(loaded, owner=worker)
        for update in (see_reloaded_weights, see_finished_update):
            update.apply(own.weights_changed, owner=worker)
        self._updating = lambda: getattr(worker, "_weight_update_active", False)

    def begin_standalone(self, scheduled: Any) -> None:
        """Note that a step begins (vLLM's `SchedulerOutput`), in an engine without a host."""
        if self.standalone:
            try:
                self.standalone.begin_step(scheduled, self._updating())
            except Exception:
                logger.exception("das: the engine's history is not kept any more; decoding goes on")
                self.standalone = None

    def call(self, command: str, payload: dict[str, Any]) -> Any:
        """Run a command of the host: `hello`, `refresh`, `visit` or `stats`. Raises only for an unknown command: a
        worker that raises during a weight sync would leave the trainer waiting for ever."""
        commands: dict[str, Callable[..., Any]] = {
            "hello": self._hello,
            "refresh": self._refresh,
            "visit": self.visit,
            "stats": self._stats,
        }
        if command not in commands:
            raise DasError(f"das_rpc: found command {command!r}, allowed: {', '.join(commands)}")
        try:
            return plain(commands[command](**payload))
        except Exception as error:
            self.counters.error = repr(error)
            logger.exception("das: %s failed; decoding goes on without drafts", command)
            return Refreshed(error=repr(error))

    def refresh(self, message: Refresh) -> Refreshed:
        """Bring everything up to date that depends on the weights or on the history."""
        answer = Refreshed() if self._decides is None else self._decides.refresh(message)
        self.counters.alarm = self.draft_weights.refresh() if self.draft_weights else None
        if self.counters.alarm:
            logger.error("das: %s", self.counters.alarm)
        return answer

    def visit(self, files: list[str]) -> Refreshed:
        """Take the history of problems that are at home on other nodes."""
        return Refreshed() if self._decides is None else self._decides.visit(files)

    def own_stats(self) -> EngineStats:
        """Return the figures that one runner alone has."""
        return EngineStats()

    def say_which_steps_have_no_graphs(self) -> None:
        """Log once from how many requests on drafted steps replay no CUDA graph."""
        vllm_config = self.runner.vllm_config
        if self.config.drafter != "none" and vllm_config.parallel_config.rank == 0:
            if beyond := without_graphs(vllm_config, self.config.num_draft_tokens):
                logger.info("das: %s", beyond)

    def _hello(self) -> Started:
        sampler, runner = type(self.runner.sampler).__name__, f"V{self.model_runner}"
        return Started(version=__version__, drafter=self.config.drafter, sampler=sampler, runner=runner)

    def _refresh(self, **payload: Any) -> Refreshed:
        if self.standalone and not payload.keys() - {"version"}:  # somebody who keeps no history says: now
            self.standalone.weights_changed(payload.get("version"))
            return Refreshed()
        return self.refresh(Refresh.of(payload))

    def _stats(self) -> EngineStats:
        counters = self.counters
        if collapsed(counters.draft_tokens, counters.accepted_tokens):
            counters.alarm = (
                f"acceptance of the {self.config.drafter} drafter collapsed: {counters.accepted_tokens} of "
                f"{counters.draft_tokens} draft tokens"
            )
        stats = counters.take() | EngineStats(model_runner=self.model_runner)
        if self._decides is not None:
            stats |= self._decides.stats() | self.own_stats()
            if self._decides.engine.log:
                self._decides.engine.log.add(Counts({**stats, "propose_seconds": []}))
        return stats
