"""The one modelled engine of the tests and the benchmarks.

It is all that there is beside das-adapter: which tokens a policy is going to write,
which drafts are right, how long a step takes. Two engines drive the package's own code
in its real order of calls:

    EngineV1    `DraftPolicy`, as on vLLM's V1 runner: drafts are found, chosen and
                verified in the next step
    EngineV2    `StepPlanner`, as on the V2 runner: a plan acts three steps later, and
                the device chooses whose tokens are verified
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from das_adapter.config import parse
from das_adapter.core.latency import StepModel, StepTimes
from das_adapter.core.length import RESPONSE, Responses
from das_adapter.core.policy import DraftPolicy, EndedRequest
from das_adapter.core.steps import Outcome, Rest, Search, TimedStep

STOP = 2
"""The token with which a response ends."""
MOST = 16
MODEL_MOST = 7
STRETCH = 16
BLIND = 2
PROMPT = 100
LONGEST = 3000
MEDIAN = 400
SPREAD = 0.8
RATES = (0.02, 0.05, 0.1, 0.2, 0.4)


class Text:
    """A response that is going to be written, and what its history says of each token.

    The history is the text with mistakes, in stretches of 16 tokens at one rate, and
    finds nothing for 2 tokens after a mistake.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        length: int | None = None,
        rates: Sequence[float] = RATES,
        unknown: float = 0.25,
        problem: int | None = None,
    ) -> None:
        """
        Args:
            rng: draws where mistakes are.
            length: tokens; None: as the distribution says.
            rates: of mistakes.
            unknown: chance of no history.
            problem: number of its problem; None: its place in the rollout.
        """
        self.length = length or int(
            min(LONGEST, np.exp(rng.normal(np.log(MEDIAN), SPREAD)) + 10)
        )
        of_stretch = rng.choice(rates, self.length // STRETCH + 2)
        rate = np.repeat(of_stretch, STRETCH)
        self.chance = (1.0 - rate).astype(np.float32)
        """Chance of each token to be right, given those before it, float32 [n]."""
        self.told = self.chance
        """The chance that the policy of drafts is told."""
        self.right = rng.random(len(self.chance)) >= rate
        self.model_right = np.zeros(0, dtype=bool)
        """Whether each token of a model's drafts is right, bool [n]."""
        self.known = rng.random() >= unknown
        self.at = 0
        """Tokens that are written."""
        self.problem = problem
        self.blind = BLIND

    def draft(self) -> np.ndarray:
        """Return what is told of each token of the draft here: its chance, given those
        before it, float32 [n].
        """
        return self.told[self.at : self.at + self._num_found()]

    def true_draft(self) -> np.ndarray:
        """Return the true chances of `draft`."""
        return self.chance[self.at : self.at + self._num_found()]

    def _num_found(self) -> int:
        blind_to = max(0, self.at - self.blind)
        found = self.known and self._next_mistake[blind_to] >= self.at
        return MOST if found else 0

    @functools.cached_property
    def _next_mistake(self) -> list[int]:
        return next_mistakes(self.right)

    @functools.cached_property
    def _next_model_mistake(self) -> list[int]:
        return next_mistakes(self.model_right)

    def write(self, drafted: int, by_model: bool = False) -> int:
        """Verify so many tokens of the draft here, the model's or the history's; return
        how many tokens are written.
        """
        accepted = 0
        if drafted:
            mistakes = self._next_model_mistake if by_model else self._next_mistake
            accepted = min(drafted, mistakes[self.at] - self.at)
        got = min(accepted + 1, self.length - self.at)
        self.at += got
        return got


def next_mistakes(right: np.ndarray) -> list[int]:
    """Return the place of the first wrong token at or behind each place, [n + 1]."""
    wrong = np.append(np.flatnonzero(~right), len(right))
    places = np.searchsorted(wrong, np.arange(len(right) + 1))
    found: list[int] = wrong[np.minimum(places, len(wrong) - 1)].tolist()
    return found


class Offers(NamedTuple):
    """The drafts of a batch, as the device has them."""

    chances: np.ndarray
    """Chance of each token, given those before it, float [b, MOST], 0 behind a draft's
    end.
    """
    lengths: list[int]
    """Tokens of each draft."""
    rows: dict[str, int]
    """Place of each request."""


NO_OFFERS = Offers(np.zeros((1, MOST), dtype=np.float32), [0], {})


def offers_of(live: Iterable[str], drafts: Sequence[np.ndarray]) -> Offers:
    """Return the drafts of requests."""
    chances = np.zeros((len(drafts), MOST), dtype=drafts[0].dtype)
    lengths = [len(draft) for draft in drafts]
    for row, draft in enumerate(drafts):
        chances[row, : lengths[row]] = draft
    rows = {req_id: row for row, req_id in enumerate(live)}
    return Offers(chances, lengths, rows)


class Engine:
    """An engine, but for what das-adapter does in it: this one drafts nothing."""

    def __init__(
        self,
        truth: StepModel,
        scatter: Callable[[], float] | None = None,
        search_s: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """
        Args:
            truth: seconds of steps.
            scatter: returns a factor by which a step is seen to take longer; None: 1.
            search_s: seconds of a look for drafts, and of each request in it.
        """
        self.truth = truth
        self.now = 0.0
        """Seconds of the clock that das-adapter sees."""
        self.steps = 0
        self.drafted = 0
        """Draft tokens that were verified."""
        self.accepted = 0
        self.looks = 0
        """Steps in which drafts were looked for."""
        self._scatter = scatter
        self._search_s = search_s
        self._exact_s = 0.0

    def rollout(
        self,
        number: int,
        texts: Sequence[Text],
        at_once: int | None = None,
        to_the_end: bool = True,
        sync: bool = True,
    ) -> float:
        """Write texts; return the seconds, scatter apart.

        Args:
            number: of the rollout.
            texts: what is written; the first begin first.
            at_once: requests at a time; None: all.
            to_the_end: False: until none waits any more.
            sync: whether a weight sync follows.
        """
        self._exact_s = 0.0
        waiting = list(enumerate(texts))
        live: dict[str, Text] = {}
        while waiting or (live and to_the_end):
            room = (at_once or len(texts)) - len(live)
            joined = {f"{number} {i}": (i, text) for i, text in waiting[:room]}
            waiting = waiting[room:]
            live |= {req_id: text for req_id, (_, text) in joined.items()}
            self._begin(joined)
            carried = self._carried(live)
            tokens = len(live) + sum(carried.values())
            began = self.now
            self._pass_time(self.truth.step(tokens, len(live), tokens > len(live)))
            got = {}
            for req_id, text in live.items():
                got[req_id] = self._write(req_id, text, carried[req_id])
            self.steps += 1
            self.drafted += tokens - len(live)
            self.accepted += sum(got.values()) - len(live)
            ended = {req_id for req_id, text in live.items() if text.at >= text.length}
            self._after(live, carried, got, ended, began)
            live = {
                req_id: text for req_id, text in live.items() if req_id not in ended
            }
        if sync:
            self._sync(number, texts, live)
        return self._exact_s

    def _pass_time(self, seconds: float, exactly: bool = False) -> None:
        """Let seconds of the truth pass."""
        self._exact_s += seconds
        scattered = self._scatter is not None and not exactly
        self.now += seconds * (self._scatter() if scattered else 1.0)

    def _look(self, requests: int) -> float:
        """Count a look for drafts; return its seconds."""
        self.looks += 1
        once_s, request_s = self._search_s
        return once_s + request_s * requests

    # What das-adapter does

    def _begin(self, joined: dict[str, tuple[int, Text]]) -> None:
        """Take requests that join: each one's place in the rollout, and its text."""

    def _carried(self, live: dict[str, Text]) -> dict[str, int]:
        """Return the draft tokens of each request in the next step, fillers
        included.
        """
        return dict.fromkeys(live, 0)

    def _write(self, req_id: str, text: Text, carried: int) -> int:
        """Verify a request's draft tokens; return how many tokens are written."""
        return text.write(carried)

    def _after(
        self,
        live: dict[str, Text],
        carried: dict[str, int],
        got: dict[str, int],
        ended: set[str],
        began: float,
    ) -> None:
        """Draft for the next step, after one that began at this time."""

    def _sync(self, number: int, texts: Sequence[Text], live: dict[str, Text]) -> None:
        """Take the weight sync behind a rollout, in which requests are still live."""


class EngineV1(Engine):
    """An engine on the V1 runner: the policy of drafts is asked behind each step."""

    def __init__(
        self,
        policy: DraftPolicy,
        truth: StepModel,
        scatter: Callable[[], float] | None = None,
        search_s: tuple[float, float] = (0.0, 0.0),
        longest: int = LONGEST,
        one_pass: StepModel | None = None,
    ) -> None:
        """`truth`, `scatter`, `search_s`: see `Engine`; `longest`: tokens that a
        response may have; `one_pass`: seconds of a pass of the model that drafts.
        """
        super().__init__(truth, scatter, search_s)
        self.policy = policy
        self._longest = longest
        self._one_pass = one_pass
        self.ended: list[EndedRequest] = []
        self._slots: dict[str, int] = {}
        self._kept: dict[str, int] = {}
        self._by_model: dict[str, int] = {}
        """Tokens of `_kept` that a model drafted."""

    def _begin(self, joined: dict[str, tuple[int, Text]]) -> None:
        for req_id, (place, text) in joined.items():
            problem = place if text.problem is None else text.problem
            self._slots[req_id] = self.policy.begin(problem, text.at, self._longest)

    def _carried(self, live: dict[str, Text]) -> dict[str, int]:
        return {req_id: self._kept.get(req_id, 0) for req_id in live}

    def _write(self, req_id: str, text: Text, carried: int) -> int:
        return text.write(carried, self._by_model.get(req_id, 0) > 0)

    def _after(
        self,
        live: dict[str, Text],
        carried: dict[str, int],
        got: dict[str, int],
        ended: set[str],
        began: float,
    ) -> None:
        slots = np.array([self._slots[req_id] for req_id in live])
        tokens = np.array(list(got.values()))
        drafts = np.array(list(carried.values()))
        left = np.array([text.length - text.at for text in live.values()])
        by_model = np.array([self._by_model.get(req_id, 0) for req_id in live])
        outcome = Outcome(
            slots,
            tokens,
            drafts if drafts.any() else None,
            by_model if self.policy.drafts else None,
            np.maximum(left - 1, 0),
        )
        decision = self.policy.next(outcome)
        asked = not isinstance(decision, Rest) or decision.asked
        self._kept = {}
        self._by_model = {}
        drafting_s = 0.0
        if isinstance(decision, Search):
            self._pass_time(self._look(len(live)), exactly=True)
            plan = self.policy.choose(decision, self._find(live, decision))
            if not isinstance(plan, Rest):
                self._by_model = dict(zip(live, plan.model.tolist(), strict=True))
                tokens_of_both = plan.history + plan.model
                self._kept = dict(zip(live, tokens_of_both.tolist(), strict=True))
                drafting_s = self._let_model_draft(plan.model)
        self.policy.flush()
        num_tokens = len(live) + int(drafts.sum())
        seconds = self.now - began - drafting_s
        timed = TimedStep(slots, tokens, num_tokens, seconds, drafting_s)
        self.policy.timed(timed._replace(asked=asked or timed.drafted))
        for req_id in sorted(ended):
            self.ended.append(self.policy.end(self._slots.pop(req_id)))

    def _let_model_draft(self, tokens: np.ndarray) -> float:
        """Let a model draft tokens for requests, int64 [b]; return its seconds."""
        drafts = self.policy.drafts
        if drafts is None or self._one_pass is None:
            return 0.0
        passes = max(int(tokens.max()), drafts.passes_every_step)
        if not passes:
            return 0.0
        asked = max(1, int(np.count_nonzero(tokens)))
        pass_s = self._one_pass.plain_step(asked)
        drafts.record_pass(asked, pass_s)
        self._pass_time(passes * pass_s, exactly=True)
        return passes * pass_s

    def _find(
        self, live: dict[str, Text], search: Search
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what is found, as `core.steps.Candidates`."""
        offsets = np.zeros(len(live) + 1, dtype=np.int64)
        found = []
        for row, text in enumerate(live.values()):
            limit = max(0, int(search.max_tokens[row]))
            survival = np.cumprod(text.draft()[:limit])
            kept = survival[survival >= search.min_chance]
            found.append(kept)
            offsets[row + 1] = offsets[row] + len(kept)
        return np.concatenate(found).astype(np.float32), offsets

    def _sync(self, number: int, texts: Sequence[Text], live: dict[str, Text]) -> None:
        for req_id in live:
            self.policy.end(self._slots.pop(req_id))
        self.policy.weight_sync(responses(number, texts))


def responses(version: int, texts: Sequence[Text]) -> Responses:
    """Return finished responses as a weight sync brings them."""
    rows = []
    for place, text in enumerate(texts):
        if text.at >= text.length:
            problem = place if text.problem is None else text.problem
            rows.append((problem, text.length, version))
    return np.array(rows, RESPONSE)


class EngineV2(Engine):
    """An engine on the V2 runner, as its host sees it. The device verifies the first
    tokens of each draft, or, with own numbers, those of greatest chance times worth.
    """

    def __init__(
        self,
        own: bool,
        truth: StepModel,
        prior: StepModel | None = None,
        scatter: Callable[[], float] | None = None,
        search_s: tuple[float, float] = (0.0, 0.0),
        longest: int | None = None,
        **das: Any,
    ) -> None:
        """
        Args:
            own: whether each request has its own number of draft tokens.
            truth, scatter, search_s: see `Engine`.
            longest: tokens that a response may have; None: each one's end is known
                when it begins, and weight syncs tell no lengths.
            prior: what is known of step times before the first; None: nothing.
            das: keys of the `das:` block.
        """
        super().__init__(truth, scatter, search_s)
        from vllm.config import CUDAGraphMode

        from das_adapter.engine.plan import DraftPlan
        from das_adapter.engine.v2.step_planner import StepPlanner

        config = parse({"drafter": "history", "max_draft_tokens": MOST} | das)
        vllm_config: Any = SimpleNamespace(
            model_config=SimpleNamespace(
                max_model_len=8192,
                get_vocab_size=lambda: 100,
                enforce_eager=not truth.sizes,
                quantization=None,
            ),
            compilation_config=SimpleNamespace(
                cudagraph_mode=CUDAGraphMode.FULL, cudagraph_capture_sizes=truth.sizes
            ),
        )
        self.planner = StepPlanner(config, vllm_config)
        self.policy = self.planner.engine.policy
        if prior is not None:
            self.policy.latency = StepTimes(prior, sizes=truth.sizes)
        self._own = own
        self._longest = longest
        if own:
            self.planner.give_own_lengths(truth.drafted_sizes or ())
        self._scheduled = DraftPlan()
        self._chosen = [DraftPlan()] * 2
        self._offers = NO_OFFERS
        self._begun: list[Any] = []
        self._ended: set[str] = set()

    def _begin(self, joined: dict[str, tuple[int, Text]]) -> None:
        self._begun = []
        for req_id, (place, text) in joined.items():
            problem = place if text.problem is None else text.problem
            longest = self._longest or text.length
            self._begun.append(_live_request(req_id, problem, longest))

    def _carried(self, live: dict[str, Text]) -> dict[str, int]:
        chosen = self._scheduled
        req_ids = list(live)
        if not self._own:
            return dict.fromkeys(req_ids, chosen.num_draft_tokens)
        longest, request_worth, _ = chosen.limits_and_worth(req_ids)
        limits = np.minimum(longest, chosen.num_draft_tokens)
        total = min(chosen.budget, int(limits.sum()))
        if not total:
            return dict.fromkeys(req_ids, 0)
        offers = self._offers
        rows = np.array([offers.rows.get(req_id, -1) for req_id in req_ids])
        survival = offers.chances.cumprod(axis=1)[rows]
        survival[rows < 0] = 0.0
        worth = survival * request_worth.astype(survival.dtype)[:, None]
        worth[np.arange(MOST) >= limits[:, None]] = -1.0
        rows = np.argsort(-worth, axis=None, kind="stable")[:total] // MOST
        counts = np.bincount(rows, minlength=len(req_ids))
        return dict(zip(req_ids, counts.tolist(), strict=True))

    def _write(self, req_id: str, text: Text, carried: int) -> int:
        row = self._offers.rows.get(req_id)
        there = 0 if row is None else self._offers.lengths[row]
        # the others are fillers
        return text.write(min(carried, there))

    def _after(
        self,
        live: dict[str, Text],
        carried: dict[str, int],
        got: dict[str, int],
        ended: set[str],
        began: float,
    ) -> None:
        from das_adapter.engine.v2.step_planner import Output, Step

        step = Step(
            self._begun,
            frozenset(self._ended),
            carried,
            True,
            began,
            req_ids=list(live),
        )
        if self._own:
            step.admitted = np.array(list(carried.values()))
        self._scheduled = self._chosen[0]
        self._offers = self._draft(live, self._scheduled, step)
        self.planner.count_last()
        sampled = []
        for req_id, count in got.items():
            tokens = [1] * count
            if self._longest and req_id in ended:
                tokens[-1] = STOP
            sampled.append(tokens)
        plan = self.planner.process_output(Output(step, sampled, self.now))
        self._chosen = [self._chosen[1], plan]
        self._begun = []
        self._ended = ended

    def _draft(self, live: dict[str, Text], chosen: Any, step: Any) -> Offers:
        """Return the drafts of the requests at the end of a step, and tell the
        host.
        """
        if not chosen.looks_up:
            return NO_OFFERS
        self._pass_time(self._look(len(live)), exactly=True)
        offers = offers_of(live, [text.draft() for text in live.values()])
        step.offer = _device_offer(offers)
        return offers

    def _sync(self, number: int, texts: Sequence[Text], live: dict[str, Text]) -> None:
        from das_adapter.engine.plan import DraftPlan
        from das_adapter.protocol.messages import Refresh

        self._ended = set(live)
        lengths = responses(number, texts).tobytes() if self._longest else b""
        self.planner.refresh(Refresh(version=number + 1, lengths=lengths))
        self._scheduled = DraftPlan()
        self._chosen = [DraftPlan()] * 2
        self._offers = NO_OFFERS


Record = tuple[np.ndarray, np.ndarray]
"""Kinds of a drafter's tokens (`core.confidence`), uint8 [n], and whether each is the
policy's token, bool [n].
"""


class DraftedText(Text):
    """A response, and how sure a model is of each token that it drafts."""

    def __init__(
        self, rng: np.random.Generator, records: Sequence[Record], **drawn: Any
    ) -> None:
        """`records`: what the response is made of, one after another."""
        super().__init__(rng, **drawn)
        kinds = np.zeros(0, np.uint8)
        right = np.zeros(0, bool)
        while len(kinds) < self.length + MODEL_MOST:
            some = records[rng.integers(len(records))]
            kinds = np.append(kinds, some[0])
            right = np.append(right, some[1])
        self.kinds = kinds
        self.right = right


class EngineWithModel(EngineV2):
    """An engine on the V2 runner with a model that drafts, and no history."""

    def __init__(
        self,
        own: bool,
        sure: bool,
        truth: StepModel,
        one_pass: StepModel,
        **others: Any,
    ) -> None:
        """
        Args:
            own, truth, others: see `EngineV2`.
            sure: whether the model says how sure it is.
            one_pass: seconds of a pass of the model.
        """
        super().__init__(
            own,
            truth,
            drafter="draft_model",
            draft={"model": "any"},
            max_draft_tokens=MODEL_MOST,
            **others,
        )
        self._sure = sure
        self._one_pass = one_pass

    def _draft(self, live: dict[str, Any], chosen: Any, step: Any) -> Offers:
        import torch

        from das_adapter.engine.v2.neural import Call

        count = chosen.num_draft_tokens
        rows = [text.kinds[text.at :][:count] for text in live.values()]
        kinds = np.array(rows, dtype=np.uint8)
        if count:
            began = self.now
            self._pass_time(count * self._one_pass.plain_step(len(live)), exactly=True)
            step.calls = [Call(len(live), count, True, began, self.now)]
            step.kinds = torch.from_numpy(kinds) if self._sure else None
        if self._sure and chosen.chances is not None:
            chances = chosen.chances[kinds]
        else:
            rate = self.planner.engine.drafts.acceptance.rate
            chances = np.full(kinds.shape, rate)
        return offers_of(live, list(chances))


def _live_request(req_id: str, problem: int, longest: int) -> Any:
    from das_adapter.engine.requests import LiveRequest

    return LiveRequest(
        req_id,
        problem,
        PROMPT,
        PROMPT + longest,
        True,
        length=PROMPT,
        stops=frozenset([STOP]),
    )


def _device_offer(offers: Offers) -> Any:
    import torch

    lengths = torch.tensor(offers.lengths, dtype=torch.int32)
    by_model = torch.zeros(len(lengths), dtype=torch.int64)
    chances = torch.from_numpy(offers.chances)
    return SimpleNamespace(lengths=lengths, chances=chances, by_model=by_model)
