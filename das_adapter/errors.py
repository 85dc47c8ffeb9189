"""The package's one exception family."""

from __future__ import annotations

import os


class DasError(Exception):
    """Anything that das-adapter refuses: the message names the key or symbol, what was found and what is allowed."""


class ConfigError(DasError):
    """A key of the config that is unknown, has a value that is not allowed, or contradicts others."""


class UnsupportedHost(DasError):
    """A host package that lacks a required symbol, or a host that das-adapter can't run in."""


def plugin_not_loaded() -> UnsupportedHost:
    """Make the error of a host whose engine's workers have not loaded das-adapter."""
    return UnsupportedHost(
        "das-adapter did not reach vLLM's workers: its entry point vllm.general_plugins:das_adapter was not loaded "
        f"there (VLLM_PLUGINS={os.environ.get('VLLM_PLUGINS')!r} must be unset or name das_adapter)"
    )
