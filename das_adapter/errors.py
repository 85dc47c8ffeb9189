"""The package's one exception family."""


class DasError(Exception):
    """Anything das-adapter refuses: the message names the key or symbol, what was found and what is allowed."""


class ConfigError(DasError):
    """An unknown, misspelt or contradictory key of the `das:` block."""


class UnsupportedHost(DasError):
    """A vLLM, veRL or Ray whose required symbols are missing."""
