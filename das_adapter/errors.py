"""The package's one exception family."""

from __future__ import annotations


class DasError(Exception):
    """Anything that das-adapter refuses: the message names the key or symbol, what was
    found and what is allowed.
    """


class ConfigError(DasError):
    """A key of the config that is unknown, has a value that is not allowed, or
    contradicts others.
    """


class UnsupportedHost(DasError):
    """A host package that lacks a required symbol, or a host that das-adapter can't run
    in.
    """
