"""The compiled core, loaded when it is first needed: configs can be read and checked where it was not built."""

from __future__ import annotations

import functools
import importlib
from typing import Any


@functools.cache
def native() -> Any:
    """Return the module `das_adapter._native`."""
    return importlib.import_module("das_adapter._native")
