"""What das-adapter changes in vLLM's engine core: slots for drafts, the draft length
that a worker chooses, tokens behind stop strings, and weight updates that nobody tells
of.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from das_adapter import compat
from das_adapter.engine import plan
from das_adapter.engine.failures import place
from das_adapter.engine.plan import SILENCE, DraftPlan
from das_adapter.engine.responses import response_log
from das_adapter.engine.settings import alone, runs_v2, settings
from das_adapter.patching import patch
from das_adapter.protocol.engine_args import draft_lengths

ONE_BY_ONE = "_das_one_by_one"
"""Attribute of vLLM's scheduler: whether the front end is told tokens one by one where
it looks for stop strings.
"""
RESPONSES = "_das_responses"
"""Attribute of vLLM's scheduler: the log of its responses; None: there is none."""
_WITH_THE_FIRST = ("new_prompt_logprobs_tensors", "events", "prefill_stats")
_WITH_THE_LAST = ("finish_reason", "stop_reason", "kv_transfer_params")
"""Fields of vLLM's `EngineCoreOutput` beside its tokens."""
_WEIGHT_CALL = re.compile(
    r"(update|load|receive|sync|refit|broadcast)\w*(weight|param)|finish_weight_update"
)
"""Names under which trainers' worker extensions take new weights."""


class PlanLookup:
    """Stands where vLLM looks up how many tokens are drafted for each request of a
    batch of some size: as many as the plan that a worker has chosen says, if the next
    step has room for them. There they are counted before any prompt is, verified or
    not: where prompts wait or are read in chunks, half of the room is theirs.
    """

    def __init__(
        self,
        scheduler: Any,
        lengths: Sequence[int],
    ) -> None:
        """`scheduler`: vLLM's; `lengths`: of which there are CUDA graphs, rising."""
        self.chosen = DraftPlan()
        """What a worker has chosen last."""
        self.scheduled: DraftPlan | None = None
        """The plan of the step that is being scheduled; None: nothing was looked up
        yet.
        """
        self.gave_up = False
        """Whether no drafts are asked for any more, whatever a worker chooses."""
        self._scheduler = scheduler
        self._lengths = lengths

    def __getitem__(self, requests: int) -> int:
        found = self._plan_for(requests)
        self.scheduled = found
        return found.num_draft_tokens

    def _plan_for(self, requests: int) -> DraftPlan:
        if self.gave_up:
            return SILENCE
        try:
            return self._with_room(requests)
        except Exception as error:
            reason = f"{error!r}{place(error)}"
            return replace(SILENCE, error=reason)

    def _with_room(self, requests: int) -> DraftPlan:
        scheduler = self._scheduler
        chosen = self.chosen
        wanted = chosen.num_draft_tokens
        if not wanted:
            return chosen
        running, waiting = scheduler.get_request_counts()
        step_tokens = scheduler.max_num_scheduled_tokens
        each_request = step_tokens // max(requests, running)
        room = each_request // 2 - 1
        if room < wanted and not waiting:
            if not self._reads_in_chunks():
                room = each_request - 1
        of_one_length = chosen.num_model_tokens or not chosen.budget
        if room < wanted and of_one_length:
            fitting = [0]
            for length in self._lengths:
                if length <= room:
                    fitting.append(length)
            room = max(fitting)
        return chosen.at_most(max(0, room))

    def _reads_in_chunks(self) -> bool:
        running = self._scheduler.running
        return any(request.is_prefill_chunk for request in running)


@patch(
    "vllm.v1.core.sched.scheduler:Scheduler.__init__", since="0.24", needs="vllm_config"
)
def reserve_draft_slots(stock: Any) -> Any:
    """Without it the policy copy, which writes keys and values, would write into
    another request's block: vLLM's scheduler reserves slots for the draft tokens of its
    own drafters alone. And on V1, from vLLM 0.25 on, a request that joins with one
    token would carry as many draft tokens as there may be, which nobody has drafted, to
    replay a CUDA graph that we do not capture: vLLM adds none where it looks the draft
    length up. Remove this patch when vLLM reserves slots for drafters of plug-ins
    (patches/vllm/0003) and lets a worker choose the draft length.
    """

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        config = settings(self.vllm_config)
        if config is not None:
            setattr(self, RESPONSES, response_log(self.vllm_config))
        if config is not None and config.copies_policy:
            self.num_lookahead_tokens = max(
                self.num_lookahead_tokens,
                config.model_tokens,
            )
            # from vLLM 0.33 on; said before these slots were reserved
            if hasattr(self, "can_skip_drafts"):
                self.can_skip_drafts = runs_v2(self.vllm_config)
        if config is not None and config.drafter != "none":
            lacks_stops = compat.missing(compat.ENDS_AT_STOP_STRINGS)
            setattr(self, ONE_BY_ONE, bool(lacks_stops))
            is_v2 = runs_v2(self.vllm_config)
            if is_v2 and self.dynamic_sd_lookup:
                self.dynamic_sd_lookup = PlanLookup(self, draft_lengths(config))
            elif config.controlled and not is_v2:
                batch_sizes = self.max_num_running_reqs + 1
                self.dynamic_sd_lookup = [config.num_draft_tokens] * batch_sizes

    return init


def one_by_one(
    output: Any,
    requests: Mapping[str, Any],
) -> list[Any]:
    """Split what a request got in a step (vLLM's `EngineCoreOutput`) into outputs of
    one token, if it has stop strings, or is not among the unfinished `requests` any
    more: the front end ends it with the token that completes one.
    """
    count = len(output.new_token_ids)
    if count < 2:
        return [output]
    request = requests.get(output.request_id)
    if request is not None and not request.sampling_params.stop:
        return [output]
    experts = getattr(output, "routed_experts", None)
    last = count - 1
    parts = []
    for i, token in enumerate(output.new_token_ids):
        part: dict[str, Any] = {"new_token_ids": [token]}
        for name in ("new_logprobs", "new_sampling_mask"):
            rows = getattr(output, name, None)
            if rows is not None:
                part[name] = rows.slice_request(i, 1)
        if experts is not None:
            # the first part has the rows of the prompt, too
            end = len(experts) - last + i
            begin = end - 1 if i else 0
            part["routed_experts"] = experts[begin:end]
        left_out: list[str] = []
        if i > 0:
            left_out += _WITH_THE_FIRST
        if i < last:
            left_out += _WITH_THE_LAST
        for name in left_out:
            if hasattr(output, name):
                part[name] = None
        replaced = msgspec.structs.replace(output, **part)
        parts.append(replaced)
    return parts


@patch("vllm.v1.core.sched.scheduler:Scheduler.schedule", since="0.24")
def send_the_plan(stock: Any) -> Any:
    """Without it the workers of an engine on the V2 runner know how many tokens a step
    drafts, but not for whom they are. Remove this patch when vLLM lets a worker choose
    the draft tokens of each request.
    """

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        lookup = getattr(self, "dynamic_sd_lookup", None)
        if not isinstance(lookup, PlanLookup):
            return stock(self, *args, **kwargs)
        lookup.scheduled = None
        output = stock(self, *args, **kwargs)
        # vLLM looks nothing up for a step without tokens.
        if lookup.scheduled is not None:
            setattr(output, plan.ATTRIBUTE, lookup.scheduled)
        return output

    return schedule


@patch(
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
    since="0.24",
    needs="scheduler_output, model_runner_output",
)
def follow_steps(stock: Any) -> Any:
    """Without it the scheduler of an engine on the V2 runner does not hear which draft
    length its worker has chosen, an engine without a host does not log its responses,
    and, before vLLM 0.32, a response keeps the tokens that its last draft brought
    behind a stop string. Remove this patch when vLLM lets a
    worker choose the draft length, and 0.32 is the oldest supported.
    """

    def update_from_output(
        self: Any,
        scheduler_output: Any,
        model_runner_output: Any,
    ) -> Any:
        chosen = getattr(model_runner_output, plan.ATTRIBUTE, None)
        lookup = getattr(self, "dynamic_sd_lookup", None)
        if chosen is not None and isinstance(lookup, PlanLookup):
            lookup.chosen = chosen
        responses = getattr(self, RESPONSES, None)
        running = [] if responses is None else list(self.running)
        answers = stock(self, scheduler_output, model_runner_output)
        if responses is not None:
            idle = not any(self.get_request_counts())
            responses.add_finished(running, idle=idle)
        if getattr(self, ONE_BY_ONE, False):
            for answer in answers.values():
                parts = []
                for output in answer.outputs:
                    parts += one_by_one(output, self.requests)
                answer.outputs = parts
        return answers

    return update_from_output


@patch(
    "vllm.v1.engine.core:EngineCore.collective_rpc",
    since="0.24",
    needs="method",
    feature="weight syncs by calls of workers, without a host",
)
def see_weight_calls(stock: Any) -> Any:
    """Without it an engine without a host does not see that a trainer's worker
    extension has copied weights into the parameters. Remove this patch when vLLM tells
    plug-ins that its weights were updated.
    """

    def collective_rpc(
        self: Any,
        method: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        answers = stock(self, method, *args, **kwargs)
        if not isinstance(method, str):
            return answers
        writes_weights = _WEIGHT_CALL.search(method)
        if writes_weights and alone(self.vllm_config):
            stock(self, "das_rpc", args=("refresh", {}))
        return answers

    return collective_rpc


@patch(
    "vllm.v1.engine.core:EngineCore.add_lora",
    since="0.24",
    needs="lora_request",
    feature="weight syncs of adapters, without a host",
)
def see_adapters(stock: Any) -> Any:
    """Without it an engine without a host does not see that a trainer has sent its
    adapter again. Remove this patch when vLLM tells plug-ins that an adapter was
    loaded.
    """

    def add_lora(self: Any, lora_request: Any) -> bool:
        added: bool = stock(self, lora_request)
        if alone(self.vllm_config):
            self.collective_rpc("das_rpc", args=("refresh", {}))
        return added

    return add_lora
