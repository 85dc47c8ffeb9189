"""What requests of an engine on the V2 runner have written, put together from the outputs of its steps."""

from __future__ import annotations

from das_adapter.engine.requests import LiveRequest
from das_adapter.engine.v2.harvest import Harvest


def request(req_id: str, room: int = 10, stops: frozenset[int] = frozenset(), length: int = 8) -> LiveRequest:
    return LiveRequest(req_id, problem=7, start=8, end=8 + room, record=True, length=length, stops=stops)


def test_a_response_ends_at_its_stop_and_at_its_last_token_whatever_a_later_step_has_sampled() -> None:
    harvest = Harvest()
    harvest.begin(request("stops", stops=frozenset({3})), [])
    harvest.begin(request("full", room=4), [])
    harvest.output(["full", "stops"], [[1, 2, 5], [1, 3, 9]])
    harvest.output(["stops", "full"], [[8], [6, 7]])
    harvest.output(["unknown", "full"], [[1], [2]])
    stopped, full = harvest.take("stops"), harvest.take("full")
    assert stopped is not None
    assert full is not None
    assert (stopped.text.tolist(), stopped.problem, stopped.record) == ([1, 3], 7, True)
    assert full.text.tolist() == [1, 2, 5, 6]
    assert full.text.dtype == "int32"
    assert harvest.take("full") is harvest.take("unknown") is None


def test_a_request_that_comes_back_goes_on_with_the_text_it_brings() -> None:
    harvest = Harvest()
    harvest.begin(request("a"), [])
    harvest.output(["a"], [[4]])
    harvest.begin(request("a", length=10), [4, 5])  # preempted, and one step's output was not heard
    harvest.output(["a", "b"], [[], [1]])
    harvest.output(["a"], [[6]])
    response = harvest.take("a")
    assert response is not None
    assert response.text.tolist() == [4, 5, 6]
