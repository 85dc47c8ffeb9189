"""Draft from a history, as an installed package: `python draft_once.py`."""

import tempfile

import numpy as np

from das_adapter.config import parse
from das_adapter.core.index import SuffixIndex
from das_adapter.core.index.store import HistoryStore

assert parse({"drafter": "history"}) is not None
text = np.arange(100, dtype=np.int32)
with tempfile.TemporaryDirectory() as directory, HistoryStore(directory) as store:
    store.add(problem=7, tokens=text, version=1)
    store.seal()
    index = SuffixIndex.attach(directory)
request = index.open(7, text[:0])
index.extend(request, text[:10])
(draft,), _ = index.draft([request], [4])
assert draft.tolist() == [10, 11, 12, 13], draft
print("drafted", draft.tolist())
