"""Write the files of results/: one row a line, with command, versions, hardware and
revision.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from das_adapter.reports import provenance as made
from das_adapter.reports.provenance import ENGINE, RUN, save, written

__all__ = ["MEASURES", "provenance", "save", "written"]

TUNING = "das_adapter/core/tuning.py"
"""The numbers that both the index and the C++ core read."""
MEASURES = {
    "ablation.py": [
        "das_adapter/core",
        "das_adapter/sim",
        "das_adapter/engine/v2/step_planner.py",
        "das_adapter/engine/v2/live.py",
        "csrc",
    ],
    "agreement.py": ["das_adapter/core/index", TUNING, "csrc"],
    "controller_grid.py": [
        "das_adapter/core",
        "das_adapter/engine/v2/step_planner.py",
        "das_adapter/engine/v2/live.py",
        "csrc",
    ],
    "controller_overhead.py": ["das_adapter/core", "das_adapter/engine", "csrc"],
    "graphs.py": [
        f"das_adapter/{part}"
        for part in ("protocol", "engine/v2/admission.py", "engine/v2/speculator.py")
    ],
    "history.py": ["das_adapter/core/index", TUNING, "csrc"],
    "index.py": ["das_adapter/core/index", TUNING, "csrc"],
    "kernels.py": ["das_adapter/engine/v2"],
    "mutation.py": ["das_adapter", "tests"],
    "noise_acceptance.py": [
        "das_adapter/engine/quantised.py",
        "csrc/quantised_linear.cpp",
    ],
    "others.py": ["das_adapter/core/index", TUNING, "csrc"],
    "pipelines.py": [*RUN, "das_adapter/verl"],
    "published.py": ["das_adapter/core", "das_adapter/sim"],
    "run_ahead.py": [*RUN, "das_adapter/verl"],
    "scale.py": ["das_adapter/core", "das_adapter/service", "csrc"],
    "scale_nodes.py": ["das_adapter/core", "das_adapter/service", "csrc"],
    "simulator.py": ["das_adapter/core", "das_adapter/sim"],
    "soak.py": [*RUN, "das_adapter/verl"],
    "training.py": [*RUN, "das_adapter/verl"],
    "v2_drafts.py": ["das_adapter/core/index", TUNING, "das_adapter/engine/v2", "csrc"],
}
"""The code that each script measures; others measure the engine. `stale.py` lists the
results of code that has changed since.
"""


def provenance() -> dict[str, Any]:
    """Return what made the result: this process."""
    return made.provenance(MEASURES.get(Path(sys.argv[0]).name, ENGINE))
