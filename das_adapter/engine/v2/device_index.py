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

SCAN = {
    "cuda": (3072, 256),
    "cpu": (1, 512),
}
"""Programs that scan live text, of all requests together where these are few, and
tokens that each looks at at once, by kind of device. As many programs of one warp run
on an H100 at once, beside those of the other kernels.
"""
SPLITS = 128
"""Programs that scan for one request, at most: their places are merged one after the
other.
"""


Opening = tuple[int, int, int]
"""A request that begins: its slot, the key of its problem's text, and the tokens before
the response.
"""
Closing = tuple[int, int]
"""A request that ends: its slot, and the tokens that its response has at most, 0 for a
text that is not kept.
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
        closed = tuning.CLOSED_TEXTS * slots
        closed = min(closed, tuning.MAX_CLOSED_TEXTS)
        self._steps = steps
        self._min_chance = min_chance
        self._vocabulary = vocabulary
        kind_of_device = self.device.type
        scan = SCAN.get(kind_of_device, SCAN["cpu"])
        self._programs, self._block = scan
        self.words = self._int32(words)
        self.arena = Arena(
            words=self.words,
            slots=slots,
            closed=closed,
            members=tuning.MEMBER_TEXTS,
            beside=kind_of_device == "cuda",
        )
        tables = self.arena.tables
        tables_size = len(tables.all)
        self._tables = self._int64(tables_size)
        """Copy of the arena's tables on the device."""
        self._parts = tables.parts(self._tables)
        num_texts = slots + closed
        self._text_len = self._int32(num_texts)
        num_places = int(search.PLACES.value)
        num_candidates = int(search.CANDIDATES.value)
        num_sources = int(votes.SOURCES.value)
        num_kinds = num_sources * int(votes.KINDS.value)
        offer_size = 4 + 2 * steps
        max_programs = max(slots, self._programs)
        num_keys = 2 * max_programs * num_places
        self._seen = self._int64(num_keys)
        self.found = self._int64(slots, 3, num_candidates)
        """The places that vote, of each request; see `search`."""
        self.found_others = self._int64(slots, 3, num_places)
        """Those in texts that all problems share."""
        self.offers = self._int32(slots, offer_size)
        """What was offered to the request of each slot; see `votes.learn`."""
        self.outcomes = self._int32(num_kinds, 2)
        """What became of the last drafts; see `votes.learn`."""
        self.cells = self._int32(num_kinds, 2)
        """Tokens tried and accepted, by kind; see `votes.estimate`."""
        self.sources = self._float64(num_sources, 3)
        """Tokens tried, accepted and expected, by source; see `votes.estimate`."""
        self.chance = self._float64(num_kinds)
        """Chance of each kind of draft token; see `votes.estimate`."""
        rules = native().drafting_rules()
        start = torch.from_numpy(rules["CHANCES"])
        self.start = start.to(self.device)
        """Chance of each kind of draft token before anything is learned, float64
        [kinds].
        """
        self._kept = int(rules["KEPT"])
        """Tokens of a kind or a source that count after a weight sync, at most."""
        fading = torch.from_numpy(rules["FADING"])
        self._fading = fading.to(self.device)
        """Weight of sealed text by its age in visits, int32 [256]."""
        self._slots = self._int64(slots)
        self._num_sampled = self._int32(slots)
        self.drafts = self._int64(slots, steps)
        """Draft tokens in batch order; 0 beyond the draft."""
        self.confidence = torch.zeros_like(self.drafts, dtype=torch.float32)
        """Chance of each draft token, given those before it; 0 beyond the draft."""
        self.real = self._int32(slots)
        """Lengths of the drafts."""
        texts_address = texts.data_ptr()
        words_address = self.words.data_ptr()
        distance_bytes = texts_address - words_address
        word_bytes = self.words.element_size()
        self._texts_at = distance_bytes // word_bytes
        """Offset of vLLM's array of texts from the begin of the arena, tokens."""
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        """Graphs of a step, by the size of the batch."""
        self._beside: torch.cuda.Stream | None = None
        if self.words.is_cuda:
            self._beside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    # Requests

    def open(self, opened: Sequence[Opening]) -> None:
        """Take requests that begin."""
        if not opened:
            return
        row_size = self.texts.stride(0)
        opened_slots = []
        for slot, problem, begin in opened:
            opened_slots.append(slot)
            row_begin = slot * row_size
            text_at = self._texts_at + row_begin
            self.arena.open(
                slot=slot,
                problem=problem,
                at=text_at + begin,
                begin=begin,
            )
        size = len(opened_slots)
        slots = self._int64(size)
        sent_slots = np.array(opened_slots, dtype=np.int64)
        _copy(sent_slots, slots)
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
        if kept is None:
            return
        end = kept.at + size
        words = self.words[kept.at : end]
        _copy(text.copy(), words)
        length = self._text_len[kept.text]
        length.fill_(size)

    def close(
        self,
        closed: Sequence[Closing],
        total_len: torch.Tensor,
    ) -> None:
        """Take requests that end; `total_len`: int32 [slots], tokens of each."""
        begins = self.arena.tables.begin
        for slot, room in closed:
            begin = int(begins[slot])
            kept = self.arena.close(slot, room)
            if kept is None:
                continue
            text_end = begin + kept.room
            request_text = self.texts[slot]
            text = request_text[begin:text_end]
            size = len(text)
            kept_end = kept.at + size
            copied = self.words[kept.at : kept_end]
            copied.copy_(text)
            own_len = total_len[slot]
            written = own_len - begin
            kept_len = self._text_len[kept.text]
            torch.clamp(written, max=size, out=kept_len)

    def forget_outcomes(self) -> None:
        """Forget which drafts were accepted."""
        self.offers.zero_()
        self.outcomes.zero_()
        self.cells.zero_()
        self.sources.zero_()
        self.chance.zero_()

    def forget_chances(self) -> None:
        """Reduce what was learned of the chances of draft tokens, at a weight sync, as
        `SuffixIndex.forget_chances` does.
        """
        tried = self.cells[:, 0]
        accepted = self.cells[:, 1]
        is_cut = tried > self._kept
        share = accepted * self._kept // tried.clamp(min=1)
        accepted.copy_(torch.where(is_cut, share, accepted))
        tried.clamp_(max=self._kept)
        source_tried = self.sources[:, :1].clamp(min=1.0)
        kept_share = (self._kept / source_tried).clamp(max=1.0)
        self.sources.mul_(kept_share)

    # A step

    def draft(
        self,
        slots: torch.Tensor,
        num_sampled: torch.Tensor,
        total_len: torch.Tensor,
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
            tables = self.arena.tables
            _copy(tables.all, self._tables)
        graph_size = self._graph_size(requests)
        if graph_size > requests:
            graph_slots = self._slots[:graph_size]
            graph_slots.fill_(-1)
        own_slots = self._slots[:requests]
        own_slots.copy_(slots)
        own_num_sampled = self._num_sampled[:requests]
        own_num_sampled.copy_(num_sampled)
        num_open = len(self.texts)
        own_len = self._text_len[:num_open]
        begins = self._parts["begin"]
        torch.sub(total_len, begins, out=own_len)
        if graph_size > 0:
            self._graphs[graph_size].replay()
        else:
            self._launch(requests)
        return self.drafts[:requests]

    def _graph_size(self, requests: int) -> int:
        """Return the least batch size of a graph in which so many requests find room;
        0: there is none.
        """
        fitting = []
        for size in self._graphs:
            if size >= requests:
                fitting.append(size)
        return min(fitting, default=0)

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
            current = torch.cuda.current_stream(self.device)
            self._beside.wait_stream(current)
        # few programs, which wait for memory: the scan needs the processors
        with torch.cuda.stream(self._beside):
            self._launch_learning(requests)
            self._launch_sealed_search(requests)
        self._launch_live_search(requests)
        if self._beside is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._beside)
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
        num_bits = self._steps.bit_length()
        return {
            "STEPS": self._steps,
            "PADDED": 1 << num_bits,
        }

    def _launch_learning(self, requests: int) -> None:
        rows = 32
        programs = -(-requests // rows)
        grid = (programs,)
        votes.learn[grid](
            offers=self.offers,
            **self._texts_of_requests(),
            outcomes=self.outcomes,
            requests=requests,
            **self._draft_sizes(),
            ROWS=rows,
        )
        votes.estimate[(1,)](
            outcomes=self.outcomes,
            cells=self.cells,
            sources=self.sources,
            start=self.start,
            chance=self.chance,
            LANES=256,
        )

    def _launch_sealed_search(self, requests: int) -> None:
        tables = self._parts
        grid = requests, 3
        search.search_sealed[grid](
            **self._texts_of_requests(),
            sealed_texts=tables["sealed_texts"],
            sealed_places=tables["sealed_places"],
            sealed_count=tables["sealed_count"],
            others=tables["others"],
            fading=self._fading,
            found=self.found,
            found_others=self.found_others,
            num_warps=1,
        )

    def _launch_live_search(self, requests: int) -> None:
        tables = self._parts
        splits = self._programs // requests
        splits = min(splits, SPLITS)
        splits = max(splits, 1)
        live = {
            **self._texts_of_requests(),
            "begin": tables["begin"],
            "members": tables["members"],
            "seen": self._seen,
            "MEMBERS": tuning.MEMBER_TEXTS,
            "num_warps": 1,
        }
        grid = requests, splits
        search.scan_live[grid](
            **live,
            member_count=tables["member_count"],
            BLOCK=self._block,
        )
        merge_grid = requests, 2
        search.merge_live[merge_grid](
            **live,
            found=self.found,
            splits=splits,
            BLOCK=self._block // 2,
        )

    def _launch_vote(self, requests: int) -> None:
        votes.vote[(requests,)](
            arena=self.words,
            slots=self._slots,
            text_len=self._text_len,
            num_sampled=self._num_sampled,
            found=self.found,
            found_others=self.found_others,
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

    def _int32(self, *shape: int) -> torch.Tensor:
        """Return zeros of a shape on the device, int32."""
        return torch.zeros(*shape, dtype=torch.int32, device=self.device)

    def _int64(self, *shape: int) -> torch.Tensor:
        """Return zeros of a shape on the device, int64."""
        return torch.zeros(*shape, dtype=torch.int64, device=self.device)

    def _float64(self, *shape: int) -> torch.Tensor:
        """Return zeros of a shape on the device, float64."""
        return torch.zeros(*shape, dtype=torch.float64, device=self.device)


def _copy(array: np.ndarray, tensor: torch.Tensor) -> None:
    """Copy an array to a tensor; waits for no device."""
    source = torch.from_numpy(array)
    if tensor.is_cuda:
        source = source.pin_memory()
    tensor.copy_(source, non_blocking=True)
