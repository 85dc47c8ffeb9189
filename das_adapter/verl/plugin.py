"""The `verl.plugins` entry point, loaded at the end of every `import verl`."""

from __future__ import annotations

import logging

try:
    from das_adapter.verl import hooks

    hooks.install()
except Exception:  # veRL swallows what a plug-in raises
    logging.getLogger("das_adapter").exception(
        "das: no hooks installed; this veRL process runs without das-adapter"
    )
    raise
