"""The hooks on a NeMo-RL worker's engine, without NeMo-RL and without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from das_adapter.config import DasConfig
from das_adapter.nemo_rl import engine_hooks
from das_adapter.nemo_rl.engine_hooks import REFITS, SyncEngineHooks
from das_adapter.protocol.label import Label

PROMPT = {"prompt_token_ids": [1, 2, 3]}


class KeptSession:
    """A session that keeps what it is told."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.recorded: list[tuple[Label, list[int]]] = []
        self.prompts: list[list[int]] = []
        self.synced: list[int] = []

    def start(self) -> None:
        pass

    def fetch_guest_history(self, problems: list[int]) -> None:
        pass

    def record_response(
        self, label: Label, tokens: list[int], prompt: list[int], **_: Any
    ) -> None:
        self.recorded.append((label, tokens))
        self.prompts.append(list(prompt))

    def sync(self, version: int) -> None:
        self.synced.append(version)

    def flush(self) -> None:
        pass


class Engine:
    """vLLM's synchronous engine, which writes two tokens for each sample."""

    def __init__(self) -> None:
        self.llm_engine = SimpleNamespace(step=lambda: None)
        self.answers: list[Any] = [None]
        """What the ranks answer to any call."""
        self.finish_reason = "length"
        self.params: list[Any] = []
        """Sampling parameters of the last requests."""

    def generate(self, prompts: list[Any], params: list[Any]) -> list[Any]:
        self.params = params
        outputs = []
        for request in params:
            samples = [
                SimpleNamespace(token_ids=[7, 8], finish_reason=self.finish_reason)
                for _ in range(request.n)
            ]
            outputs.append(SimpleNamespace(outputs=samples, metrics=None))
        return outputs

    def collective_rpc(self, method: str, *_: Any, **__: Any) -> list[Any]:
        return self.answers


class Worker:
    """A worker's engine with the hooks, and what its session is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.session = KeptSession()
        monkeypatch.setattr(engine_hooks, "Session", lambda *_, **__: self.session)
        self.engine = Engine()
        self.hooks = SyncEngineHooks(self.engine, DasConfig(), source="worker 0")
        self.hooks.start()

    def write(self, samples: int = 1, **extra_args: int) -> dict[str, Any]:
        """Ask for some samples; return the labels with which the engine is asked."""
        params = SimpleNamespace(n=samples, extra_args=extra_args or None)
        self.engine.generate([PROMPT], params)
        [asked] = self.engine.params
        return asked.extra_args


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(monkeypatch)


@pytest.mark.parametrize("method", sorted(REFITS))
def test_a_refit_that_failed_on_a_rank_is_no_weight_sync(
    worker: Worker, method: str
) -> None:
    worker.engine.answers = [True, False]
    worker.engine.collective_rpc(method)
    assert (worker.hooks.version, worker.session.synced) == (0, [])
    worker.engine.answers = [True, None]
    worker.engine.collective_rpc(method)
    assert (worker.hooks.version, worker.session.synced) == (1, [1])


def test_a_call_that_is_no_refit_is_no_weight_sync(worker: Worker) -> None:
    worker.engine.collective_rpc("sleep")
    assert (worker.hooks.version, worker.session.synced) == (0, [])


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_several_samples_of_a_request_do_not_share_its_seed(
    worker: Worker, samples: int
) -> None:
    asked = worker.write(samples)
    assert ("das_seed" in asked) == (samples == 1)
    recorded = [label.seed is None for label, _ in worker.session.recorded]
    assert recorded == [samples > 1] * samples


def test_a_prompt_of_tokens_alone_is_recorded_with_its_responses(
    worker: Worker,
) -> None:
    ids = {"prompt_token_ids": [4, 5]}
    features = SimpleNamespace(prompt_token_ids=[4, 5], mm_features=["an image"])
    plain = SimpleNamespace(prompt_token_ids=[4, 5])
    images = {**ids, "multi_modal_data": {"image": ["an image"]}}
    hashed = {**ids, "mm_hashes": {"image": ["1a"]}}
    prompts = [ids, {**ids, "multi_modal_data": {}}, plain, images, hashed, features]
    params = SimpleNamespace(n=1, extra_args=None)
    worker.engine.generate(prompts, params)
    assert worker.session.prompts == [[4, 5]] * 3 + [[]] * 3


def test_what_a_request_says_of_itself_stands(worker: Worker) -> None:
    asked = worker.write(das_problem=5)
    assert asked["das_problem"] == 5
    assert asked["das_record"] == 1


@pytest.mark.parametrize(("finish_reason", "texts"), [("stop", 1), ("abort", 0)])
def test_a_response_that_was_aborted_is_not_recorded(
    worker: Worker, finish_reason: str, texts: int
) -> None:
    worker.engine.finish_reason = finish_reason
    worker.write()
    assert [tokens for _, tokens in worker.session.recorded] == [[7, 8]] * texts


@pytest.mark.parametrize(
    ("validating", "alone", "record"),
    [(False, False, 1), (False, True, 1), (True, True, 0)],
)
def test_a_rollout_actors_validation_covers_requests_while_it_goes_on(
    worker: Worker, validating: bool, alone: bool, record: int
) -> None:
    worker.hooks.validating = validating
    worker.hooks.only_validating = alone
    token = engine_hooks.labels.set([Label(problem=5, seed=1)])
    try:
        assert worker.write()["das_record"] == record
    finally:
        engine_hooks.labels.reset(token)
