"""The requests of a simulation, in columns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
_FIRST_VALUES = {"slot": -1, "log_min_chance": np.inf}
"""Values of new requests, where they are neither given nor 0."""


def int_zeros(count: int) -> Ints:
    """Return so many zeros, int64 [count]."""
    return np.zeros(count, dtype=np.int64)


class Requests:
    """The requests of a run in columns of tokens, counts or seconds, shape (n,): a row
    for each request, in the order in which they were made.
    """

    problem: Ints
    """Number of its problem."""
    visit: Ints
    """Number of times that its problem was visited before."""
    text: Ints
    """Row of its recorded response; -1: it has none."""
    num_prompt_tokens: Ints
    """Tokens of its prompt."""
    num_output_tokens: Ints
    """Tokens that it is going to write."""
    max_tokens: Ints
    """Maximum number of tokens that it may write."""
    version: Ints
    """Weight version at which it was sent."""
    engine: Ints
    """Number of the engine that it was sent to."""
    num_written: Ints
    """Tokens that it has written."""
    num_told: Ints
    """Tokens of these that its engine's policy of drafts knows of."""
    num_forwards: Ints
    """Steps that it took part in."""
    num_drafted: Ints
    """Draft tokens that it had in all steps."""
    num_accepted: Ints
    """Draft tokens of these that the policy confirmed."""
    num_preemptions: Ints
    """Number of times that it was preempted."""
    num_unread: Ints
    """Tokens that its engine has to read before it continues."""
    num_draft_tokens: Ints
    """Tokens of its present draft from the history."""
    num_draft_hits: Ints
    """Tokens of `num_draft_tokens` that the policy will confirm."""
    num_model_tokens: Ints
    """Draft tokens in place of these, from the policy copy or a neural drafter."""
    num_model_hits: Ints
    """Tokens of `num_model_tokens` that the policy will confirm."""
    ended_s: Floats
    """When it ended, seconds."""
    slot: Ints
    """Its place in its engine's controller; -1: none."""
    log_min_chance: Floats
    """Logarithm of the chance under which its drafts end until the controller is asked
    again; inf: no draft.
    """
    max_draft_tokens: Ints
    """Maximum tokens of its drafts until the controller is asked again."""
    handle: Ints
    """Its handle in its engine's index; 0: none."""
    num_indexed: Ints
    """Tokens of it that the index has."""
    num_ahead: Ints
    """Tokens that were written ahead of it; -1: it is itself written ahead, for a
    request of a later step.
    """
    num_same: Ints
    """Number of its first tokens that are the same under the weights before, with the
    same noise.
    """

    def __init__(self) -> None:
        for name, annotation in Requests.__annotations__.items():
            dtype: type = np.int64
            if annotation == "Floats":
                dtype = np.float64
            setattr(self, name, np.zeros(0, dtype))

    def add(self, **columns: Ints) -> Ints:
        """Add requests; return their rows.

        Args:
            columns: `problem`, `visit`, `text`, `num_prompt_tokens`,
                `num_output_tokens` and `max_tokens`, and others whose values are not
                the usual ones; int64 [n] each.
        """
        names = Requests.__annotations__
        assert columns.keys() <= names.keys()
        first = len(self)
        count = len(columns["problem"])
        for name in names:
            column = getattr(self, name)
            if name in columns:
                values = columns[name]
            else:
                first_value = _FIRST_VALUES.get(name, 0)
                values = np.full(count, first_value)
            added = np.asarray(values, column.dtype)
            grown = np.append(column, added)
            setattr(self, name, grown)
        return np.arange(first, first + count)

    def room(self, rows: Ints) -> Ints:
        """Return how many draft tokens each request can use, int64 [n]: its last token
        needs no draft.
        """
        output_tokens = self.num_output_tokens[rows]
        max_tokens = self.max_tokens[rows]
        end = np.minimum(output_tokens, max_tokens)
        left = end - self.num_written[rows]
        return np.maximum(left - 1, 0)

    def context(self, rows: Ints) -> Ints:
        """Return the tokens of each request's prompt and response, int64 [n]."""
        prompt = self.num_prompt_tokens[rows]
        written = self.num_written[rows]
        return prompt + written

    def verified(self, rows: Ints) -> Ints:
        """Return how many draft tokens each request has in the next step, int64 [n]."""
        of_history = self.num_draft_tokens[rows]
        of_model = self.num_model_tokens[rows]
        return of_history + of_model

    def unfinished(self, rows: Ints) -> Bools:
        """Return whether each request has more to write, bool [n]."""
        written = self.num_written[rows]
        return written < self.num_output_tokens[rows]

    def clear_drafts(self, rows: Ints | int) -> None:
        """Drop the drafts of requests."""
        self.num_draft_tokens[rows] = 0
        self.num_model_tokens[rows] = 0

    def __len__(self) -> int:
        return len(self.problem)
