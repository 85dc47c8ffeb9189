"""Warnings of das-adapter in processes in which a host has changed global logging."""

from __future__ import annotations

import subprocess
import sys

import pytest

ERRORS_ALONE = """
logging.basicConfig(level=logging.ERROR)
for handler in logging.getLogger().handlers:
    handler.setLevel(logging.ERROR)
"""
"""What `model_hosting_container_standards` does, which veRL's vLLM server imports."""
CONFIGURED = """
import logging.config
console = {"class": "logging.StreamHandler", "level": "ERROR"}
logging.config.dictConfig({
    "version": 1, "disable_existing_loggers": False,
    "handlers": {"console": console}, "root": {"level": "ERROR", "handlers": ["console"]},
})
"""
ANOTHER_PROGRAM = "logging.basicConfig(level=logging.INFO, force=True)"
NONE = "logging.getLogger().handlers.clear()"


def said(before: str, after: str, call: str) -> str:
    """What a process writes to stderr that imports das-adapter between two changes of
    global logging, and then calls this.
    """
    lines = ("import logging", before, "import das_adapter.compat", after)
    program = "\n".join([*lines, f"das_adapter.compat.logger.{call}('das: PROBE')"])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return done.stderr


@pytest.mark.parametrize("change", [ERRORS_ALONE, CONFIGURED, ANOTHER_PROGRAM, NONE])
def test_a_warning_is_seen_once_whatever_a_host_has_made_of_the_root_logger(
    change: str,
) -> None:
    assert said("", change, "warning").count("das: PROBE") == 1
    assert said(change, "", "warning").count("das: PROBE") == 1
    assert said("", change, "error").count("das: PROBE") == 1
    assert said(change, "", "debug") == ""


def test_a_level_that_the_user_sets_counts() -> None:
    level = "logging.getLogger('das_adapter').setLevel(logging.ERROR)"
    assert said(level, ERRORS_ALONE, "warning") == ""
    assert said("", level, "warning") == ""
