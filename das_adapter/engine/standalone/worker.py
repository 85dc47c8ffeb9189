"""One worker of an engine without a host: it harvests trajectories, and brings its drafter up to date itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from das_adapter.engine.standalone.history import SharedHistory
from das_adapter.protocol.messages import Refresh, Trajectory, responses
from das_adapter.protocol.metrics import EngineStats

MOST_LIVE_TOKENS = 2**22
"""Tokens of finished responses after which they are sealed although the weights are the same: live text takes more
memory."""


class Standalone:
    """One worker's part. All ranks of an engine see the same requests and weight updates; the first has the history."""

    def __init__(self, state: Any, directory: str):
        """`state`: the worker's `WorkerState`; `directory`: name of the history on this node."""
        from vllm.distributed import get_tp_group

        self._state = state
        self._first = get_tp_group().rank_in_group == 0
        self._version = 0
        self._due = False
        """Whether the weights have changed since the last step."""
        self.synced = False
        """Whether they had before the last refresh; else that sealed what was written."""
        self._unread = state.config.shares_history
        """Whether there may be a history that an earlier engine has left."""
        self._finished: list[Trajectory] = []
        self._live_tokens = 0
        self._shared: SharedHistory | None = None
        if state.config.shares_history and self._first:
            self._shared = SharedHistory(directory, state.config.history)

    def stats(self) -> EngineStats:
        """Return the figures of an engine that looks after its own history."""
        return {"engines_behind": int(bool(self._shared.trouble))} if self._shared else {}

    def weights_changed(self) -> None:
        """Take note that the weights are other ones from the next step on. A weight sync of many calls counts once."""
        self._due = True

    def begin_step(self, scheduled: Any, updating: bool) -> None:
        """Take what has finished since the last step, and bring the drafter up to date if the weights have changed.
        `scheduled`: vLLM's `SchedulerOutput`; `updating`: a weight update is under way, which ends later."""
        self._harvest(scheduled.finished_req_ids)
        if not scheduled.total_num_scheduled_tokens or updating:
            return
        if self._due or self._unread or self._live_tokens > MOST_LIVE_TOKENS:
            self._version, self.synced = self._version + self._due, self._due
            self._due, self._unread, self._live_tokens = False, False, 0
            lengths, self._finished = responses(self._finished), []
            published = self._shared.sync() if self._shared else None
            self._state.refresh(Refresh(self._version, published, lengths.tobytes()))  # what a host would say

    def _harvest(self, req_ids: Iterable[str]) -> None:
        for req_id in req_ids:
            response = self._state.response(req_id)
            if response is None or response.text is None:
                continue
            self._live_tokens += len(response.text)
            if not response.record or not self._first:
                continue
            trajectory = Trajectory(response.problem, np.array(response.text, np.int32).tobytes(), self._version)
            self._finished.append(trajectory)
            if self._shared:
                self._shared.add(trajectory)
