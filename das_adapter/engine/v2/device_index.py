"""The index of an engine on its device: what `core.index.SuffixIndex` is on the host,
for the requests that run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from das_adapter.core.index.values import Int32
from das_adapter.core.native import native
from das_adapter.engine.v2 import search, votes
from das_adapter.engine.v2.arena import Arena

MEMBERS = 64
"""Most texts of a problem, of running and of ended requests, that a request drafts
from.
"""
CLOSED = 32
"""Most texts of ended requests, in those that run at once."""
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
        closed = min(CLOSED * slots, 8192)
        self._steps = steps
        self._min_chance = min_chance
        self._vocabulary = vocabulary
        self._programs, self._block = SCAN.get(self.device.type, SCAN["cpu"])
        self.words = self._zeros(words, torch.int32)
        self.arena = Arena(
            self.words, slots, closed, MEMBERS, beside=self.device.type == "cuda"
        )
        self._tables = self._zeros(len(self.arena.tables.all), torch.int64)
        self._parts = self.arena.tables.parts(self._tables)
        self._text_len = self._zeros(slots + closed, torch.int32)
        places = int(search.PLACES.value)
        kinds = int(votes.KINDS.value)
        self._seen = self._zeros(2 * places * max(slots, self._programs), torch.int64)
        self.found = self._zeros((slots, 3, 4 * places), torch.int64)
        """Of each request, the places that vote; see `search`."""
        self.offers = self._zeros((slots, 4 + 2 * steps), torch.int32)
        """What was offered to the request of each slot; see `votes.learn`."""
        self.outcomes, self.cells = (
            self._zeros((2 * kinds, 2), torch.int32) for _ in range(2)
        )
        self.sources, self.chance = (
            self._zeros((2, 3), torch.float64),
            self._zeros(2 * kinds, torch.float64),
        )
        """What is learned; see `votes.estimate`."""
        rules = native().drafting_rules()
        self.start = torch.from_numpy(rules["CHANCES"]).to(self.device)
        """Chance of each kind of draft token before anything is learned, float64
        [kinds].
        """
        self._fading = torch.from_numpy(rules["FADING"]).to(self.device)
        """Weight of sealed text by its age in visits, int32 [256]."""
        self._slots, self._num_sampled = (
            self._zeros(slots, torch.int64),
            self._zeros(slots, torch.int32),
        )
        self.drafts = self._zeros((slots, steps), torch.int64)
        """Draft tokens in batch order; 0 beyond the draft."""
        self.confidence = self._zeros((slots, steps), torch.float32)
        """Chance of each draft token, given those before it; 0 beyond the draft."""
        self.real = self._zeros(slots, torch.int32)
        """Lengths of the drafts."""
        self._row = (texts.data_ptr() - self.words.data_ptr()) // 4
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._beside = torch.cuda.Stream(self.device) if self.words.is_cuda else None  # type: ignore[no-untyped-call]

    # Requests

    def open(self, opened: Sequence[tuple[int, int, int]]) -> None:
        """Take requests that begin: slot, key of the problem's text, and tokens before
        the response.
        """
        for slot, problem, begin in opened:
            self.arena.open(
                slot, problem, self._row + slot * self.texts.stride(0) + begin, begin
            )
        if opened:
            slots = self._zeros(len(opened), torch.int64)
            _copy(np.array([slot for slot, _, _ in opened], dtype=np.int64), slots)
            self.offers[:, 0].index_fill_(0, slots, 0)

    def add(self, problem: int, text: Int32) -> None:
        """Take a text that was written ahead for a request, one that has begun, with
        the key of its problem's text.
        """
        if len(text) and (kept := self.arena.add(problem, len(text))) is not None:
            _copy(text.copy(), self.words[kept.at : kept.at + len(text)])
            self._text_len[kept.text].fill_(len(text))

    def close(self, closed: Sequence[tuple[int, int]], total_len: torch.Tensor) -> None:
        """Take requests that end: slot, and tokens that its response has at most, 0 for
        a text that is not kept; `total_len`: int32 [slots], tokens of each request.
        """
        for slot, room in closed:
            begin = int(self.arena.tables.begin[slot])
            if (kept := self.arena.close(slot, room)) is not None:
                text = self.texts[slot, begin : begin + kept.room]
                self.words[kept.at : kept.at + len(text)].copy_(text)
                torch.clamp(
                    total_len[slot] - begin,
                    max=len(text),
                    out=self._text_len[kept.text],
                )

    def forget_outcomes(self) -> None:
        """Forget which drafts were accepted."""
        for learned in (
            self.offers,
            self.outcomes,
            self.cells,
            self.sources,
            self.chance,
        ):
            learned.zero_()

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
        size = min((s for s in self._graphs if s >= requests), default=0)
        if size > requests:
            self._slots[:size].fill_(-1)
        self._slots[:requests].copy_(slots)
        self._num_sampled[:requests].copy_(num_sampled)
        torch.sub(
            total_len, self._parts["begin"], out=self._text_len[: len(self.texts)]
        )
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
        tables = self._parts
        rows = 32
        text = {"text_at": tables["text_at"], "text_len": self._text_len}
        mine = {"arena": self.words, "slots": self._slots, **text}
        steps = {"STEPS": self._steps, "PADDED": 1 << self._steps.bit_length()}

        def parts(*names: str) -> dict[str, torch.Tensor]:
            return {name: tables[name] for name in names}

        if self._beside is not None:
            self._beside.wait_stream(torch.cuda.current_stream(self.device))
        # few programs, which wait for memory: the scan needs the processors
        with torch.cuda.stream(self._beside):
            votes.learn[(-(-requests // rows),)](
                offers=self.offers,
                **mine,
                outcomes=self.outcomes,
                requests=requests,
                **steps,
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
            search.search_sealed[(requests, 2)](
                **mine,
                **parts("sealed_texts", "sealed_places", "sealed_count"),
                fading=self._fading,
                found=self.found,
                num_warps=1,
            )
        splits = max(1, min(SPLITS, self._programs // requests))
        live = {
            **mine,
            **parts("begin", "members"),
            "seen": self._seen,
            "MEMBERS": MEMBERS,
            "num_warps": 1,
        }
        search.scan_live[(requests, splits)](
            **live, **parts("member_count"), BLOCK=self._block
        )
        search.merge_live[(requests, 2)](
            **live, found=self.found, splits=splits, BLOCK=self._block // 2
        )
        if self._beside is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._beside)
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
            **steps,
            num_warps=1,
        )

    def _zeros(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)


def _copy(array: np.ndarray, tensor: torch.Tensor) -> None:
    source = torch.from_numpy(array)
    tensor.copy_(source.pin_memory() if tensor.is_cuda else source, non_blocking=True)
