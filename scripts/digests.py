"""Write the record of what the code of the tried versions does,
`das_adapter/tried_digests.json`.

    python scripts/digests.py [HOST:VERSION=DIRECTORY ...]

Without arguments: of the versions of vLLM in `compat.HOSTS`, whose wheels
`scripts/matrix.py` unpacks into build/matrix, and of the other hosts that are installed
here. DIRECTORY is the package itself, such as a checkout's `nemo_rl`. What is not
computed again keeps its digests.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from matrix import unpacked

from das_adapter import compat, tried

Versions = dict[str, dict[str, str]]


def main() -> None:
    """Compute digests, and write them beside those that stay."""
    found = {host: tried.recorded(host) for host in compat.HOSTS}
    for host, version, directory in given(sys.argv[1:]) if sys.argv[1:] else at_hand():
        found[host][version] = tried.digests(host, directory)
        print(f"{host} {version}: {len(found[host][version])} functions", flush=True)
    for host, versions in found.items():
        watched = tried.watched(host)
        for version in set(versions) - set(compat.HOSTS[host].tried):
            del versions[version]
        for version, digests in versions.items():
            versions[version] = {
                path: digest for path, digest in digests.items() if path in watched
            }
    tried.RECORD.write_text(written(found), encoding="utf-8")


def given(arguments: list[str]) -> Iterator[tuple[str, str, Path]]:
    """Yield host, version and directory of each argument."""
    for argument in arguments:
        parts = re.fullmatch(r"(\w+):([^=]+)=(.+)", argument)
        if parts is None or parts[1] not in compat.HOSTS:
            raise SystemExit(
                f"{argument!r}: expected HOST:VERSION=DIRECTORY, HOST one of"
                f" {', '.join(compat.HOSTS)}"
            )
        yield parts[1], parts[2], Path(parts[3]).absolute()


def at_hand() -> Iterator[tuple[str, str, Path | None]]:
    """Yield host, version and directory of what can be had without being asked for."""
    for version in compat.HOSTS["vllm"].tried:
        wheel = unpacked(version)
        if wheel is None:
            raise SystemExit(f"vllm {version}: no index that pip knows has its wheel")
        yield "vllm", version, wheel[1] / "vllm"
    for host, known in compat.HOSTS.items():
        installed = compat.version(host)
        if host != "vllm" and installed in known.tried:
            yield host, installed, None


def written(record: dict[str, Versions]) -> str:
    """Write a record: by host and function, one a line, the versions that have each
    digest.
    """
    hosts = []
    for host, versions in record.items():
        functions: dict[str, dict[str, list[str]]] = {}
        for version, digests in versions.items():
            for path, digest in digests.items():
                functions.setdefault(path, {}).setdefault(digest, []).append(version)
        lines = ",\n".join(
            f"    {json.dumps(path)}: {json.dumps(functions[path])}"
            for path in sorted(functions)
        )
        hosts.append(
            f"  {json.dumps(host)}: {{\n{lines}\n  }}"
            if lines
            else f"  {json.dumps(host)}: {{}}"
        )
    return "{\n" + ",\n".join(hosts) + "\n}\n"


if __name__ == "__main__":
    main()
