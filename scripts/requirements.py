"""Print the requirements of the package and of the extras named, one a line: for
installing them before the build.
"""

import sys
import tomllib
from pathlib import Path

meta = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
project = meta["project"]
extras = list(sys.argv[1:])
wanted = [*project["dependencies"], *meta["build-system"]["requires"], "cmake", "ninja"]
for extra in extras:
    for requirement in project["optional-dependencies"][extra]:
        if requirement.startswith(f"{project['name']}["):
            extras += requirement.split("[")[1].rstrip("]").split(",")
        else:
            wanted.append(requirement)
print("\n".join(dict.fromkeys(w.replace(" ", "") for w in wanted)))
