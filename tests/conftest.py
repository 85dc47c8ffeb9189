from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def pytest_itemcollected(item: pytest.Item) -> None:
    """With several pytest workers, what shares a fixture that is dear stays on one: a file's tests on one vLLM build,
    and whole training runs one after the other."""
    kind = item.path.relative_to(TESTS).parts[0]
    if "engine" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.engine)
        item.add_marker(pytest.mark.xdist_group(f"{item.path.stem}-{item.callspec.params['vllm_env']}"))
    elif kind != "unit":
        item.add_marker(pytest.mark.xdist_group(item.path.stem if kind == "contract" else kind))
