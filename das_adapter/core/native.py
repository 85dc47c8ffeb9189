"""The compiled core, loaded when it is first needed: configs can be read and checked
where it was not built.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

from das_adapter.errors import DasError


@functools.cache
def native() -> Any:
    """Return the module `das_adapter._native`.

    Raises:
        DasError: it is not there, as in a checkout, which hides the installed package
            from what runs in its root.
    """
    try:
        return importlib.import_module("das_adapter._native")
    except ModuleNotFoundError:
        root = Path(__file__).parents[2]
        raise DasError(
            "das_adapter._native: not found, since das_adapter was imported from"
            f" {root}, where it is not built; start from another directory, or `pip"
            f" install -e {root}`"
        ) from None
