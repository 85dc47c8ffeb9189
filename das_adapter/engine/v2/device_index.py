"""The index of an engine on its device: what `core.index.SuffixIndex` is on the host,
for the requests that run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from das_adapter.core import tuning
from das_adapter.core.index.values import Int32
from das_adapter.core.native import native
from das_adapter.engine.v2 import search, votes
from das_adapter.engine.v2.arena import Arena

SCAN = {"cuda": (3072, 256), "cpu": (1, 512)}
"""Programs that scan live text, of all requests together where these are few, and
tokens that each looks at at once, by kind of device. As many programs of one warp run
on an H100 at once, beside those of the other kernels.
"""
SPLITS = 128
"""Programs that scan for one request, at most: their places are merged one after the
other.
"""


class DeviceIndex:
    """Sealed text of the problems that are drafted for, their requests' live text, and
    what was learned.

    No call waits for the device. Requests are known by the slots that vLLM gives them.
    """

    def __init__(
        self,
        texts: torch.Tensor,
        steps: int,
        words: int,
        min_chance: float,
        vocabulary: int,
    ) -> None:
        """`texts`: int32 [slots, length], the tokens of all requests, prompts included,
        to which vLLM appends; `steps`: most tokens of a draft; `words`: of 32 bits, of
        the arena; `min_chance`: a draft ends before the token whose chance to survive
        falls under this; `vocabulary`: tokens of the policy.
        """
        self.texts = texts
        self.device = texts.device
        slots, _ = texts.shape
        closed = min(tuning.CLOSED_TEXTS * slots, tuning.MAX_CLOSED_TEXTS)
        self._steps = steps
        self._min_chance = min_chance
        self._vocabulary = vocabulary
        self._programs, self._block = SCAN.get(self.device.type, SCAN["cpu"])
        self.words = self._zeros(words, torch.int32)
        self.arena = Arena(
            self.words,
            slots,
            closed,
            tuning.MEMBER_TEXTS,
            beside=self.device.type == "cuda",
        )
        tables = self.arena.tables
        self._tables = self._zeros(len(tables.all), torch.int64)
        """Copy of the arena's tables on the device."""
        self._parts = tables.parts(self._tables)
        self._text_len = self._zeros(slots + closed, torch.int32)
        places = int(search.PLACES.value)
        kinds = int(votes.KINDS.value)
        programs = max(slots, self._programs)
        self._seen = self._zeros(2 * places * programs, torch.int64)
        self.found = self._zeros((slots, 3, 4 * places), torch.int64)
        """The places that vote, of each request; see `search`."""
        self.offers = self._zeros((slots, 4 + 2 * steps), torch.int32)
        """What was offered to the request of each slot; see `votes.learn`."""
        self.outcomes = self._zeros((2 * kinds, 2), torch.int32)
        """What became of the last drafts; see `votes.learn`."""
        self.cells = self._zeros((2 * kinds, 2), torch.int32)
        """Tokens tried and accepted, by kind; see `votes.estimate`."""
        self.sources = self._zeros((2, 3), torch.float64)
        """Tokens tried, accepted and expected, by source; see `votes.estimate`."""
        self.chance = self._zeros(2 * kinds, torch.float64)
        """Chance of each kind of draft token; see `votes.estimate`."""
        rules = native().drafting_rules()
        self.start = torch.from_numpy(rules["CHANCES"]).to(self.device)
        """Chance of each kind of draft token before anything is learned, float64
        [kinds].
        """
        self._fading = torch.from_numpy(rules["FADING"]).to(self.device)
        """Weight of sealed text by its age in visits, int32 [256]."""
        self._slots = self._zeros(slots, torch.int64)
        self._num_sampled = self._zeros(slots, torch.int32)
        self.drafts = self._zeros((slots, steps), torch.int64)
        """Draft tokens in batch order; 0 beyond the draft."""
        self.confidence = self._zeros((slots, steps), torch.float32)
        """Chance of each draft token, given those before it; 0 beyond the draft."""
        self.real = self._zeros(slots, torch.int32)
        """Lengths of the drafts."""
        self._texts_at = (texts.data_ptr() - self.words.data_ptr()) // 4
        """Offset of vLLM's array of texts from the begin of the arena, tokens."""
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        """Graphs of a step, by the size of the batch."""
        self._beside: torch.cuda.Stream | None = None
        if self.words.is_cuda:
            self._beside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    # Requests

    def open(self, opened: Sequence[tuple[int, int, int]]) -> None:
        """Take requests that begin: slot, key of the problem's text, and tokens before
        the response.
        """
        if not opened:
            return
        for slot, problem, begin in opened:
            row = self._texts_at + slot * self.texts.stride(0)
            self.arena.open(slot, problem, row + begin, begin)
        opened_slots = np.array([slot for slot, _, _ in opened], dtype=np.int64)
        slots = self._zeros(len(opened), torch.int64)
        _copy(opened_slots, slots)
        num_offered = self.offers[:, 0]
        num_offered.index_fill_(0, slots, 0)

    def add(self, problem: int, text: Int32) -> None:
        """Take a text that was written ahead for a request, one that has begun, with
        the key of its problem's text.
        """
        size = len(text)
        if not size:
            return
        kept = self.arena.add(problem, size)
        if kept is not None:
            words = self.words[kept.at : kept.at + size]
            _copy(text.copy(), words)
            self._text_len[kept.text].fill_(size)

    def close(self, closed: Sequence[tuple[int, int]], total_len: torch.Tensor) -> None:
        """Take requests that end: slot, and tokens that its response has at most, 0 for
        a text that is not kept; `total_len`: int32 [slots], tokens of each request.
        """
        for slot, room in closed:
            begin = int(self.arena.tables.begin[slot])
            kept = self.arena.close(slot, room)
            if kept is None:
                continue
            text = self.texts[slot, begin : begin + kept.room]
            copied = self.words[kept.at : kept.at + len(text)]
            copied.copy_(text)
            written = total_len[slot] - begin
            kept_len = self._text_len[kept.text]
            torch.clamp(written, max=len(text), out=kept_len)

    def forget_outcomes(self) -> None:
        """Forget which drafts were accepted."""
        self.offers.zero_()
        self.outcomes.zero_()
        self.cells.zero_()
        self.sources.zero_()
        self.chance.zero_()

    # A step

    def draft(
        self, slots: torch.Tensor, num_sampled: torch.Tensor, total_len: torch.Tensor
    ) -> torch.Tensor:
        """Draft for a batch, and learn from what became of its last drafts.

        Args:
            slots: int64 [requests].
            num_sampled: int32 [requests], tokens that each got; who got none has no
                draft.
            total_len: int32 [slots], tokens of each request, these included.

        Returns:
            int64 [requests, steps], a part of `drafts`.
        """
        requests = len(slots)
        if self.arena.changed:
            self.arena.changed = False
            _copy(self.arena.tables.all, self._tables)
        fitting = [size for size in self._graphs if size >= requests]
        size = min(fitting, default=0)
        if size > requests:
            self._slots[:size].fill_(-1)
        self._slots[:requests].copy_(slots)
        self._num_sampled[:requests].copy_(num_sampled)
        own_len = self._text_len[: len(self.texts)]
        torch.sub(total_len, self._parts["begin"], out=own_len)
        if size:
            self._graphs[size].replay()
        else:
            self._launch(requests)
        return self.drafts[:requests]

    def capture(self, sizes: Sequence[int]) -> None:
        """Capture a step as a CUDA graph, for each of these batch sizes, before any
        request has begun.
        """
        self._slots.fill_(-1)
        for size in sorted(sizes, reverse=True):
            self._launch(size)  # compiles
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._launch(size)
            self._graphs[size] = graph

    def _launch(self, requests: int) -> None:
        """Launch the kernels of a step: what does not depend on live text in a stream
        of its own, beside the scan of that.
        """
        if self._beside is not None:
            self._beside.wait_stream(torch.cuda.current_stream(self.device))
        # few programs, which wait for memory: the scan needs the processors
        with torch.cuda.stream(self._beside):
            self._launch_learning(requests)
            self._launch_sealed_search(requests)
        self._launch_live_search(requests)
        if self._beside is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._beside)
        self._launch_vote(requests)

    def _texts_of_requests(self) -> dict[str, torch.Tensor]:
        """Return the arguments by which all kernels but the vote find texts."""
        return {
            "arena": self.words,
            "slots": self._slots,
            "text_at": self._parts["text_at"],
            "text_len": self._text_len,
        }

    def _draft_sizes(self) -> dict[str, int]:
        """Return the sizes of a draft for which kernels are compiled."""
        return {"STEPS": self._steps, "PADDED": 1 << self._steps.bit_length()}

    def _launch_learning(self, requests: int) -> None:
        rows = 32
        votes.learn[(-(-requests // rows),)](
            offers=self.offers,
            **self._texts_of_requests(),
            outcomes=self.outcomes,
            requests=requests,
            **self._draft_sizes(),
            ROWS=rows,
        )
        votes.estimate[(1,)](
            self.outcomes,
            self.cells,
            self.sources,
            self.start,
            self.chance,
            LANES=256,
        )

    def _launch_sealed_search(self, requests: int) -> None:
        tables = self._parts
        search.search_sealed[(requests, 2)](
            **self._texts_of_requests(),
            sealed_texts=tables["sealed_texts"],
            sealed_places=tables["sealed_places"],
            sealed_count=tables["sealed_count"],
            fading=self._fading,
            found=self.found,
            num_warps=1,
        )

    def _launch_live_search(self, requests: int) -> None:
        tables = self._parts
        splits = max(1, min(SPLITS, self._programs // requests))
        live = {
            **self._texts_of_requests(),
            "begin": tables["begin"],
            "members": tables["members"],
            "seen": self._seen,
            "MEMBERS": tuning.MEMBER_TEXTS,
            "num_warps": 1,
        }
        search.scan_live[(requests, splits)](
            **live, member_count=tables["member_count"], BLOCK=self._block
        )
        search.merge_live[(requests, 2)](
            **live, found=self.found, splits=splits, BLOCK=self._block // 2
        )

    def _launch_vote(self, requests: int) -> None:
        votes.vote[(requests,)](
            self.words,
            self._slots,
            text_len=self._text_len,
            num_sampled=self._num_sampled,
            found=self.found,
            chance=self.chance,
            offers=self.offers,
            drafts=self.drafts,
            confidence=self.confidence,
            real=self.real,
            vocabulary=self._vocabulary,
            min_chance=self._min_chance,
            **self._draft_sizes(),
            num_warps=1,
        )

    def _zeros(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)


def _copy(array: np.ndarray, tensor: torch.Tensor) -> None:
    source = torch.from_numpy(array)
    if tensor.is_cuda:
        source = source.pin_memory()
    tensor.copy_(source, non_blocking=True)
