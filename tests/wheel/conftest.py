from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--wheel-dir",
        help="Where sdist and wheel are left; default: they are thrown away.",
    )
