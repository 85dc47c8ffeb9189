"""The package's one exception family."""

from __future__ import annotations

import os


class DasError(Exception):
    """Anything das-adapter refuses: the message names the key or symbol, what was found and what is allowed."""


class ConfigError(DasError):
    """An unknown, misspelt or contradictory key of the `das:` block."""


class UnsupportedHost(DasError):
    """A vLLM, veRL or Ray whose required symbols are missing."""


def plugin_not_loaded() -> UnsupportedHost:
    """What a host says whose engine's workers don't know das-adapter."""
    return UnsupportedHost(
        "das-adapter did not reach vLLM's workers: its entry point vllm.general_plugins:das_adapter was not loaded "
        f"there (VLLM_PLUGINS={os.environ.get('VLLM_PLUGINS')!r} must be unset or name das_adapter)"
    )
