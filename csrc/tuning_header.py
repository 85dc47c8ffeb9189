"""Write the C++ core's part of `das_adapter/core/tuning.py` as a header.

CMake calls this when it builds, and the tests that compile C++ themselves:

    python csrc/tuning_header.py das_adapter/core/tuning.py build/tuning.hpp
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

PREFIX = "CPP_"
"""What the names of the C++ core's numbers begin with."""
HEAD = """\
// Written by csrc/tuning_header.py from das_adapter/core/tuning.py, which says the unit
// and the reason of each number.
#pragma once

#include <array>
#include <cstdint>

namespace das::tuning {

"""
TAIL = """
}  // namespace das::tuning
"""


def main(table: Path, header: Path) -> None:
    """Write the header, unless it has this text already: then nothing is built anew."""
    definitions = [
        definition(name.removeprefix(PREFIX), value)
        for name, value in runpy.run_path(str(table)).items()
        if name.startswith(PREFIX)
    ]
    text = HEAD + "\n".join(definitions) + "\n" + TAIL
    if header.exists() and header.read_text() == text:
        return
    header.parent.mkdir(parents=True, exist_ok=True)
    header.write_text(text)


def definition(name: str, value: object) -> str:
    """Return the definition of a number or of a tuple of numbers in C++."""
    if isinstance(value, tuple):
        array = f"std::array<{cpp_type(value[0])}, {len(value)}>"
        elements = ", ".join(map(repr, value))
        return f"inline constexpr {array} {name}{{{elements}}};"
    return f"inline constexpr {cpp_type(value)} {name} = {value!r};"


def cpp_type(value: object) -> str:
    """Return the C++ type of a number.

    Raises:
        TypeError: it is no float, and no int that a uint32_t holds.
    """
    if isinstance(value, float):
        return "double"
    if type(value) is int and 0 <= value < 2**32:
        return "uint32_t"
    raise TypeError(f"{value!r}: expected a float, or an int from 0 to 2^32 - 1")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
