"""Copies of vLLM in which something has changed that das-adapter does not know of."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path


def mutated(package: Path, into: Path, changes: Mapping[str, tuple[str, str]]) -> Path:
    """Copy a package with changes, and return the directory to import it from; files
    that do not change are links.

    Args:
        package: the package's directory.
        changes: by file in it, what is looked for, a regular expression, and what
            stands there in the copy.
    """
    shutil.copytree(
        package,
        into / package.name,
        copy_function=os.link,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name, (old, new) in changes.items():
        path = into / package.name / name
        text, found = re.subn(old, new, path.read_text())
        assert found, f"{name} has no {old!r}"
        path.unlink()
        path.write_text(text)
    return into


ON_V2 = {
    "one value more is expected": {
        "v1/worker/gpu/model_runner.py": (
            r"adaptive_verification\.reallocate_drafts\(req_ids, idx_mapping\)",
            "adaptive_verification.reallocate_drafts(req_ids, idx_mapping)[:-1]",
        )
    },
    "a field has another name": {
        name: (r"\bnum_spec_tokens_to_schedule\b", "num_drafts_to_schedule")
        for name in (
            "v1/core/sched/output.py",
            "v1/core/sched/scheduler.py",
            "v1/core/sched/async_scheduler.py",
            "v1/worker/gpu/model_runner.py",
        )
    },
    "the plan is lost": {
        "v1/engine/core.py": (
            r"scheduler_output = (self\.scheduler\.schedule\((?:[^()]|\([^()]*\))*\))",
            r"scheduler_output = __import__('dataclasses').replace(\1)",
        )
    },
    "a method is not called any more": {
        "v1/worker/gpu/model_runner.py": (
            r"self\.adaptive_verification\.record_confidences\(",
            "print and (",
        )
    },
}
ON_V1 = {
    "a parameter more is given": {
        "v1/worker/gpu_model_runner.py": (
            r"(cast\(Any, self\.drafter\)\.propose\([^)]*slot_mappings=slot_mappings,)",
            r"\1 sampling=None,",
        )
    },
    "a field has another name": {
        name: (r"\blogits_indices\b", "rows_of_logits")
        for name in (
            "v1/spec_decode/metadata.py",
            "v1/worker/gpu_model_runner.py",
        )
    },
    "a method is not called any more": {
        "v1/engine/core.py": (
            r"self\.scheduler\.update_draft_token_ids\(draft_token_ids\)",
            "pass",
        )
    },
}
