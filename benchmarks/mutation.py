"""Whether the tests notice: small changes of the package, one at a time, each of which
has to make one of the tests fail that are named for it.

    python benchmarks/mutation.py --out FILE.json

The changes are the fixed list `mutants.toml`. Each is made in a copy of the package and
its tests, in which the tests of the change then run; without a change all of them must
pass. A change is noticed where a test fails, or where the tests do not end in time. The
command fails where less than `BAR` of the changes are noticed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import click
from provenance import provenance, save

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("mutants.toml")
PACKAGE = "das_adapter"
BAR = 0.95
"""Share of the changes that the tests have to notice."""
LIMIT_S = 300.0
"""Maximum seconds of the tests of one change."""
FOLDERS = (PACKAGE, "benchmarks", "configs", "docs", "examples", "scripts", "tests")
"""What the tests of the list need of the repository, beside `pyproject.toml`."""
HOSTS = ("verl", "nemo_rl")
AREAS = ("core", "protocol", "service", "hosts", "engine")
"""Packages of which there is a score each; all else is `others`."""
PASSED = 0
FAILED = (1, 2)
"""Exit codes of pytest where a test fails, or can't even be collected."""
FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
SKIPPED = re.compile(r"^SKIPPED .*", re.MULTILINE)
"""Lines of pytest's summary."""


@dataclass(frozen=True)
class Mutant:
    """A change of the package that a test has to notice."""

    file: str
    """Path in the package."""
    old: str
    """Text that stands there once."""
    new: str
    """Text that stands there in its place."""
    breaks: str
    """What is wrong then."""
    tests: tuple[str, ...]
    """Paths of test files, or names of tests, that ought to notice."""

    @property
    def name(self) -> str:
        """What a user calls it."""
        return f"{self.file}: {self.breaks}"

    @property
    def area(self) -> str:
        """The part of the package whose score it counts in."""
        folder, _, _ = self.file.partition("/")
        if folder in HOSTS:
            return "hosts"
        return folder if folder in AREAS else "others"

    def changed(self, text: str) -> str:
        """Return the text of its file with the change.

        Raises:
            ValueError: what it changes does not stand there exactly once.
        """
        count = text.count(self.old)
        if count != 1:
            raise ValueError(
                f"{LIST.name}: {self.name}: found {self.old!r} {count} times in"
                f" {PACKAGE}/{self.file}, expected: once"
            )
        return text.replace(self.old, self.new)


def read_mutants(path: Path = LIST) -> list[Mutant]:
    """Return the changes of a list."""
    entries = tomllib.loads(path.read_text())["mutants"]
    found = []
    for entry in entries:
        tests = tuple(entry.pop("tests"))
        found.append(Mutant(**entry, tests=tests))
    return found


@dataclass(frozen=True)
class Outcome:
    """What the tests say of a package."""

    result: str
    """`passed`, `failed` or `timed out`."""
    by: str = ""
    """The first test that failed, or why tests were skipped."""
    said: str = ""
    """What pytest printed, where a test failed."""


class Checkout:
    """A copy of the package and its tests, in a directory of its own, with an
    environment that imports this copy and all else from the present environment: an
    editable install would stand before a path of ours.
    """

    def __init__(self, directory: Path) -> None:
        """Make the copy, without what the package was built to; the compiled core is
        linked.
        """
        self._root = directory / "checkout"
        self._root.mkdir()
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        for name in FOLDERS:
            shutil.copytree(ROOT / name, self._root / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", self._root)
        core = importlib.util.find_spec(f"{PACKAGE}._native")
        if core is None or core.origin is None:
            raise click.ClickException(f"found no {PACKAGE}._native: run make env")
        linked = self._root / PACKAGE / Path(core.origin).name
        linked.symlink_to(core.origin)
        self._python = self._make_environment(directory / "env")

    def _make_environment(self, directory: Path) -> Path:
        """Return the interpreter of a new environment."""
        venv.create(directory, symlinks=True)
        variables = {"base": str(directory), "platbase": str(directory)}
        own = sysconfig.get_path("purelib", vars=variables)
        paths = [str(self._root)]
        paths += [path for path in sys.path if path.endswith("-packages")]
        # files of this kind in the directories that it names are not read
        lines = "\n".join(dict.fromkeys(paths))
        Path(own, "mutants.pth").write_text(lines + "\n")
        return directory / "bin" / "python"

    def try_mutant(self, mutant: Mutant, limit_s: float) -> Outcome:
        """Run the tests of a change with the change."""
        path = self._root / PACKAGE / mutant.file
        text = path.read_text()
        try:
            self._write(path, mutant.changed(text))
            return self.run_tests(mutant.tests, limit_s)
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        """Write a file of the package, which may be compiled already."""
        path.write_text(text)
        # one that was changed within a second may look as it was
        compiled = importlib.util.cache_from_source(str(path))
        Path(compiled).unlink(missing_ok=True)

    def run_tests(
        self, tests: Sequence[str], limit_s: float | None = None, first: bool = True
    ) -> Outcome:
        """Run tests in the copy, up to the first that fails, or all of them.

        Raises:
            click.ClickException: pytest does not run them.
        """
        command = [str(self._python), "-P", "-m", "pytest", "-q"]
        command += ["--no-header", "--tb=short", "-p", "no:cacheprovider"]
        if first:
            command.append("-x")
        variables = dict(os.environ)
        variables.setdefault("DAS_TEST_NEWEST", str(Path(sys.prefix) / "newest"))
        # programs of the present environment
        programs = str(Path(sys.executable).parent)
        variables["PATH"] = os.pathsep.join((programs, os.environ["PATH"]))
        running = subprocess.Popen(
            [*command, *tests],
            cwd=self._root,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = running.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.communicate()
            return Outcome("timed out")
        if running.returncode == PASSED:
            skipped = SKIPPED.search(said)
            return Outcome("passed", skipped[0] if skipped else "")
        if running.returncode in FAILED:
            failure = FAILURE.search(said)
            return Outcome("failed", failure[1] if failure else "", said)
        raise click.ClickException(f"pytest does not run {', '.join(tests)}:\n{said}")


def check_unchanged(checkout: Checkout, mutants: Sequence[Mutant]) -> None:
    """Make sure that the tests pass without a change.

    Raises:
        click.ClickException: one fails.
    """
    files = {test for mutant in mutants for test in mutant.tests}
    # a file that is named runs with all its tests
    tests = [test for test in sorted(files) if test.partition("::")[0] not in files]
    tests += [test for test in sorted(files) if "::" not in test]
    outcome = checkout.run_tests(tests, first=False)
    if outcome.result != "passed":
        raise click.ClickException(f"tests fail without a change:\n{outcome.said}")


def rows_of(
    mutants: Sequence[Mutant], outcomes: Sequence[Outcome]
) -> list[dict[str, Any]]:
    """Return what became of each change."""
    rows = []
    for mutant, outcome in zip(mutants, outcomes, strict=True):
        row = {
            "area": mutant.area,
            "file": mutant.file,
            "breaks": mutant.breaks,
            "tests": outcome.result,
            "by": outcome.by,
        }
        rows.append(row)
    return rows


def summed_up(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how many changes were noticed, of all and by area, and which were not."""
    noticed = defaultdict[str, list[bool]](list)
    survivors = []
    for row in rows:
        is_noticed = row["tests"] != "passed"
        noticed[row["area"]].append(is_noticed)
        if not is_noticed:
            survivors.append(f"{row['file']}: {row['breaks']}")
    areas = {}
    for area, of_area in noticed.items():
        areas[area] = {
            "mutants": len(of_area),
            "noticed": sum(of_area),
            "score": round(sum(of_area) / len(of_area), 4),
        }
    num_noticed = len(rows) - len(survivors)
    return {
        "mutants": len(rows),
        "noticed": num_noticed,
        "timed_out": sum(row["tests"] == "timed out" for row in rows),
        "score": round(num_noticed / len(rows), 4),
        "bar": BAR,
        "areas": areas,
        "survivors": survivors,
    }


def try_all(mutants: Sequence[Mutant], jobs: int, limit_s: float) -> list[Outcome]:
    """Return what the tests say of each change; so many run at once."""
    with tempfile.TemporaryDirectory(prefix="das-mutants-") as folder:
        free = Queue[Checkout]()
        for job in range(jobs):
            directory = Path(folder) / str(job)
            directory.mkdir()
            free.put(Checkout(directory))
        first = free.get()
        check_unchanged(first, mutants)
        free.put(first)

        def try_one(mutant: Mutant) -> Outcome:
            checkout = free.get()
            try:
                outcome = checkout.try_mutant(mutant, limit_s)
            finally:
                free.put(checkout)
            print(f"{outcome.result:9} {mutant.name}: {outcome.by}", flush=True)
            return outcome

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(try_one, mutants))


@click.command()
@click.option("--only", default="", help="Only changes whose names match this.")
@click.option("--jobs", default=1, help="Changes that are tried at once.")
@click.option("--limit", default=LIMIT_S, help="Seconds of the tests of a change.")
@click.option("--out", type=click.Path(path_type=Path))
def main(only: str, jobs: int, limit: float, out: Path | None) -> None:
    """Try each change, and say how many the tests notice."""
    mutants = read_mutants()
    for mutant in mutants:
        path = ROOT / PACKAGE / mutant.file
        try:
            mutant.changed(path.read_text())
        except (OSError, ValueError) as error:
            raise click.ClickException(str(error)) from None
    chosen = [mutant for mutant in mutants if re.search(only, mutant.name)]
    if not chosen:
        raise click.ClickException(f"found no change whose name matches {only!r}")
    rows = rows_of(chosen, try_all(chosen, jobs, limit))
    summary = summed_up(rows)
    for survivor in summary["survivors"]:
        print(f"not noticed: {survivor}")
    print(f"noticed: {summary['noticed']} of {summary['mutants']}")
    if out is not None:
        save(out, {"provenance": provenance(), "summary": summary, "mutants": rows})
    if summary["score"] < BAR:
        raise click.ClickException(
            f"the tests notice {summary['score']:.1%} of the changes, at least"
            f" {BAR:.0%} are wanted"
        )


if __name__ == "__main__":
    main()
