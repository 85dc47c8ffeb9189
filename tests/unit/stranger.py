"""Be another user of the node: `python stranger.py FUNCTION ARGUMENT...`, as root, who
becomes nobody. Prints JSON.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator

EMPTY_INTS = 65534
NAMES = (
    "users",
    "writer",
    "janitor",
    "manifest-0000000000000001",
    "segments-0000000000000001",
)
LEFT = (
    "ask-stranger",
    "answer-stranger",
    "batch-stranger-1",
    "texts-1",
    "away-stranger-1",
)
"""Names in a history's directory, and in its spool."""


def attempts(
    directory: str, pid: str, inside: list[str]
) -> Iterator[tuple[str, Callable[[], object]]]:
    """What a stranger may try on a history with these files, which a process writes."""
    yield "list", lambda: os.listdir(directory)
    yield "enter", lambda: os.chdir(directory)
    yield "open up", lambda: os.chmod(directory, 0o777)
    yield "own", lambda: os.chown(directory, EMPTY_INTS, EMPTY_INTS)
    yield "move away", lambda: os.rename(directory, f"{directory}-theirs")
    yield "remove", lambda: os.rmdir(directory)
    for folder in (directory, f"{directory}/spool"):
        yield (
            f"make a directory in {folder}",
            lambda folder=folder: os.mkdir(f"{folder}/theirs"),
        )
        for name in (*NAMES, *LEFT):
            path = f"{folder}/{name}"
            yield f"put {path}", lambda path=path: open(path, "w")
            yield f"link {path}", lambda path=path: os.symlink("/etc/passwd", path)
    for name in inside:
        path = f"{directory}/{name}"
        yield f"read {path}", lambda path=path: open(path, "rb").read()
        yield f"write {path}", lambda path=path: open(path, "r+b")
        yield (
            f"lock {path}",
            lambda path=path: fcntl.flock(open(path), fcntl.LOCK_EX | fcntl.LOCK_NB),
        )
        yield f"remove {path}", lambda path=path: os.unlink(path)
        yield f"keep {path}", lambda path=path: os.link(path, f"{directory}-kept")
    for name in ("mem", "environ", "maps"):
        yield (
            f"read the process's {name}",
            lambda name=name: open(f"/proc/{pid}/{name}", "rb").read(),
        )
    yield "see what the process has open", lambda: os.listdir(f"/proc/{pid}/fd")
    yield "end the process", lambda: os.kill(int(pid), 15)


def attack(directory: str, pid: str, *inside: str) -> dict[str, str]:
    """Return what came of each attempt."""
    found = {}
    for name, attempt in attempts(directory, pid, list(inside)):
        try:
            attempt()
            found[name] = "done"
        except OSError as error:
            found[name] = type(error).__name__
    return found


def take(*paths: str) -> None:
    """Take names: with a directory that has every name of a history, a file, a link, or
    a pipe, in turn.
    """
    for number, path in enumerate(paths):
        kind = number % 4
        if kind == 0:
            os.makedirs(f"{path}/spool")
            for name in (*NAMES, *(f"spool/{name}" for name in LEFT)):
                with open(f"{path}/{name}", "w") as file:
                    file.write("theirs")
            for name in ("", "spool"):
                os.chmod(f"{path}/{name}", 0o777)
        elif kind == 1:
            with open(path, "w") as file:
                file.write("theirs")
            os.chmod(path, 0o666)
        elif kind == 2:
            os.symlink(paths[0], path)
        else:
            os.mkfifo(path)


def give_up(*paths: str) -> None:
    """Remove what was taken, as far as it is the stranger's."""
    for path in paths:
        if os.lstat(path).st_uid == EMPTY_INTS:
            (
                shutil.rmtree(path)
                if os.path.isdir(path) and not os.path.islink(path)
                else os.unlink(path)
            )


def plant(directory: str) -> None:
    """Make a directory with modules that say that they were run."""
    os.mkdir(directory)
    os.chmod(directory, 0o777)
    os.makedirs(f"{directory}/das_adapter/service")
    for name in (
        "das_adapter/__init__",
        "das_adapter/service/local",
        "numpy",
        "pydantic",
        "fcntl",
        "json",
    ):
        with open(f"{directory}/{name}.py", "w") as file:
            file.write(f"open({directory + '/ran'!r}, 'w')\n")


if __name__ == "__main__":
    os.umask(0)
    os.setgroups([])
    os.setgid(EMPTY_INTS)
    os.setuid(EMPTY_INTS)
    functions: dict[str, Callable[..., object]] = {
        f.__name__: f for f in (attack, take, give_up, plant)
    }
    print(json.dumps(functions[sys.argv[1]](*sys.argv[2:])))
