"""The requests of an engine: their labels and seeds, written in the front end, and what
a worker knows of those that it drafts for.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from das_adapter.config import DasConfig
from das_adapter.protocol.label import BadLabel, Label, Labeller

logger = logging.getLogger("vllm.das_adapter")

LABEL = "_das_label"
"""Attribute of vLLM's requests: their `Label`, once it was read."""


def warm_up(req_ids: Iterable[str]) -> bool:
    """Return whether the requests of a step are those with which vLLM warms up its
    kernels before the first of a client, whose names end otherwise.
    """
    first = next(iter(req_ids), "")
    return "_warmup_" in first and first.endswith("_")


def media(request: Any) -> list[str]:
    """Return the hashes of the images, sound and video in a request's prompt, in their
    order; `request`: any of vLLM's that has `mm_features`.
    """
    features = getattr(request, "mm_features", None) or ()
    return [feature.mm_hash or feature.identifier for feature in features]


class RequestLabels:
    """Completes the requests of one front end."""

    def __init__(
        self,
        config: DasConfig,
        vllm_config: Any,
        hosted: bool,
    ) -> None:
        """`hosted`: whether a host labels the requests."""
        self._keyed = config.keyed
        self._trusts = config.history.scope in ("trusted", "global")
        self._labeller: Labeller | None = None
        if not hosted:
            source = _source(vllm_config)
            self._labeller = Labeller(
                config.verify.seed, source, joins_turns=self._trusts
            )
        self._lock = threading.Lock()
        self._warned = False
        """Whether the log has said that a request passed a host by."""

    def complete(self, request: Any) -> None:
        """Write the label and the seed of a request (vLLM's `EngineCoreRequest`).

        Without a host, one that came without problem or seed is about its prompt, and
        the n-th request of a prompt draws the same tokens in every run. The seed of the
        noise is the label's, else `SamplingParams.seed`; one that asked for no
        particular tokens has a seed that stays with it through preemptions. vLLM counts
        it on for each of the `n` samples of a request.

        With a host, one without a problem did not come through it, as over a server's
        HTTP address: there need not be a weight sync that would drop its text, so none
        is kept.

        Raises:
            BadLabel: the label is wrong, or says what only trusted clients may say.
        """
        params = request.sampling_params
        labeller = self._labeller
        if params is None:
            return
        given = Label.of(params.extra_args)
        seed = given.seed
        if seed is None:
            seed = params.seed
        if labeller is None:
            if given.problem is None:
                self._drop(params)
        else:
            if not self._trusts:
                _refuse(given)
            if given.problem is None or seed is None:
                own = self._own(labeller, request, given.record)
                if seed is None:
                    seed = own.seed
                added = replace(own, seed=None).extra_args()
                given_args = params.extra_args or {}
                params.extra_args = {**added, **given_args}
        if self._keyed:
            params.seed = _signed(
                seed,
                request.request_id,
                params.n,
            )

    def _drop(self, params: Any) -> None:
        """Let requests that begin while this one runs draft from it, and no others."""
        given = params.extra_args or {}
        params.extra_args = {**given, "das_record": 0}
        if not self._warned:
            self._warned = True
            logger.warning(
                "das: a request came without identity, not through the host, which"
                " labels requests: it counts in no figure, and its text is dropped when"
                " it ends"
            )

    def _own(
        self,
        labeller: Labeller,
        request: Any,
        record: bool,
    ) -> Label:
        """Return the label of a request that is about its prompt; of one whose prompt
        is no tokens nobody knows that there was another like it.
        """
        prompt = request.prompt_token_ids
        beside = media(request)
        if prompt is None or request.prompt_embeds is not None:
            return Label(secrets.randbits(64), record=record)
        if request.cache_salt and not self._trusts:
            beside.append(f"salt {request.cache_salt}")
        with self._lock:
            return labeller.label(
                prompt,
                validate=not record,
                media=beside,
            )


def _refuse(given: Label) -> None:
    """Refuse a label with which a client would read or write the history of a prompt
    that it need not know.
    """
    refused = {"das_problem": given.problem, "das_start": given.start}
    for key, value in refused.items():
        if value is not None:
            raise BadLabel(
                f"{key}: found {value}, allowed: none, unless the server's block has"
                " `history.scope: trusted`"
            )


def _signed(
    seed: int | None,
    req_id: str,
    samples: int,
) -> int:
    """Return a seed as a signed number of 64 bits, such as workers hold; so are those
    of the samples after it, and none is -1, which vLLM takes for no seed.
    """
    if seed is None:
        hashed = hashlib.blake2b(req_id.encode(), digest_size=8)
        seed = int.from_bytes(hashed.digest(), "little")
    unsigned = (int(seed) + 2**63) % 2**64
    wrapped = unsigned - 2**63
    # vLLM counts it on for each sample: not beyond 2**63 - 1, and not past -1
    first = min(wrapped, 2**63 - samples)
    if -samples <= first < 0:
        first -= samples
    return first


def _source(vllm_config: Any) -> str:
    """Return what distinguishes this front end from others of the run, which count the
    same prompts: their samples must differ.
    """
    parallel = vllm_config.parallel_config
    parts = [
        socket.gethostname(),
        os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        vllm_config.model_config.seed,
        parallel.data_parallel_rank,
        parallel._api_process_rank,
    ]
    # of SkyRL's servers, which see the same devices
    bundles = os.environ.get("VLLM_RAY_BUNDLE_INDICES")
    if bundles:
        parts.append(bundles)
    return repr(tuple(parts))


def label_of(request: Any) -> Label:
    """Return the label of a request of vLLM's, as the front end has completed it
    (`RequestLabels`).
    """
    label: Label | None = getattr(request, LABEL, None)
    if label is None:
        params = request.sampling_params
        label = Label.of(params.extra_args if params else None)
        setattr(request, LABEL, label)
    return label


@dataclass(slots=True)
class LiveRequest:
    """A request that is drafted for: what the engine knows of it."""

    req_id: str
    problem: int
    start: int
    """Length at which its response began."""
    end: int
    """Length at which it stops."""
    record: bool
    """Whether its text may serve as history."""
    ahead: np.ndarray = field(
        default_factory=lambda: np.zeros(0, dtype=np.int32),
    )
    """What was written ahead of its response, int32 token ids."""
    stops: frozenset[int] = frozenset()
    """Tokens that end it."""
    ends_outside: bool = False
    """Whether the front end may end it, at strings: to the worker it looks as if it
    were aborted.
    """
    slot: int = -1
    """The controller's slot of it; -1: it has none yet."""
    began: float = field(default_factory=time.time)
    """When it joined the batch, seconds since the epoch."""
    length: int = 0
    """Tokens when it joined the batch (V2 runner alone)."""
    text: list[int] | None = None
    """Tokens that it has written, where the host needs them."""
    is_of_tokens: bool = True
    """Whether its prompt is tokens; behind embeddings nobody can draft from its text.
    """

    @classmethod
    def of(
        cls,
        req_id: str,
        request: Any,
        longest: int,
    ) -> LiveRequest:
        """Make the record of a request of vLLM's (its prompt, parameters and
        `mm_features` are read); `longest`: tokens of a text at most.
        """
        prompt = request.prompt_token_ids
        label = label_of(request)
        embeddings = getattr(request, "prompt_embeds", None)
        is_of_tokens = prompt is not None and embeddings is None
        if prompt is None:  # it has embeddings in their place
            prompt = [0] * len(request.prompt_embeds)
        most_tokens = longest
        stops = frozenset[int]()
        ends_outside = False
        params = request.sampling_params
        if params is not None:
            most_tokens = params.max_tokens or longest
            if params.ignore_eos:  # vLLM's own set has the end of the text even then
                stop_ids = params.stop_token_ids
            else:
                stop_ids = params.all_stop_token_ids
            stops = frozenset(stop_ids or ())
            ends_outside = bool(params.stop)
        ahead = label.ahead or b""
        return cls(
            req_id,
            problem=label.problem_of(prompt, media(request)),
            start=label.start_in(len(prompt)),
            end=min(longest, len(prompt) + most_tokens),
            record=label.record,
            ahead=np.frombuffer(ahead, dtype=np.int32),
            stops=stops,
            ends_outside=ends_outside,
            is_of_tokens=is_of_tokens,
        )

    def is_whole(self, last: int) -> bool:
        """Return whether the text, of a request that is over, is not that of an aborted
        one; `last`: the most tokens that a step adds, among which its end may be.
        """
        text = self.text or []
        length = self.start + len(text)
        is_full = length >= self.end
        last_tokens = text[-last:]
        has_stop = not self.stops.isdisjoint(last_tokens)
        return self.ends_outside or is_full or has_stop
