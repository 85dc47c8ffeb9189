"""Check that a release is ready: version, changelog, citation and tag agree. `python
scripts/release.py --help`.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDER = "REPOSITORY_URL"
"""What stands in the README where the address of the repository belongs."""
URLS = "[project.urls]\n"
ADDRESSES = {
    "Repository": "",
    "Issues": "/issues",
    "Changelog": "/blob/main/CHANGELOG.md",
}
"""Names of addresses in pyproject.toml, and what of each follows the repository's."""


def version(root: Path = ROOT) -> str:
    """Return the package's version."""
    found = re.search(
        r'__version__ = "(.+)"', (root / "das_adapter" / "__init__.py").read_text()
    )
    assert found
    return found[1]


def problems(tag: str | None, root: Path = ROOT) -> Iterator[str]:
    """Yield what keeps a version from being released; without a tag its section of the
    changelog may lack a date.
    """
    ours = version(root)
    if tag and tag != f"v{ours}":
        yield (
            f"the tag is {tag}, das_adapter/__init__.py says {ours}: the tag must be"
            f" v{ours}"
        )
    cited = re.search(
        r"^version: (.+)$", (root / "CITATION.cff").read_text(), re.MULTILINE
    )
    if not cited or cited[1] != ours:
        yield (
            f"CITATION.cff has version {cited and cited[1]}, das_adapter/__init__.py"
            f" says {ours}"
        )
    sections = re.findall(
        r"^## \[(.+?)\](?: - (.+))?$", (root / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    newest, date = next(section for section in sections if section[0] != "Unreleased")
    if newest != ours:
        yield (
            f"the newest section of CHANGELOG.md is {newest}, das_adapter/__init__.py"
            f" says {ours}"
        )
    if tag and not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        yield (
            f"the section {newest} of CHANGELOG.md has no date, but '{date}': write the"
            " day of the release"
        )


def name(repository: str, root: Path = ROOT) -> None:
    """Write the addresses of the repository into pyproject.toml and CITATION.cff, in
    place of earlier ones.

    The README gets it in its command to clone and before its links, since the package
    index shows it.
    """
    address = repository.rstrip("/")
    path = root / "pyproject.toml"
    names = "|".join(ADDRESSES)
    text = re.sub(rf'^(?:{names}) = ".*"\n', "", path.read_text(), flags=re.MULTILINE)
    lines = "".join(f'{key} = "{address}{rest}"\n' for key, rest in ADDRESSES.items())
    path.write_text(text.replace(URLS, URLS + lines))
    tomllib.loads(path.read_text())
    path = root / "CITATION.cff"
    text = re.sub(r"^repository-code: .*\n", "", path.read_text(), flags=re.MULTILINE)
    path.write_text(
        re.sub(
            r"^(license: .*\n)",
            rf"\1repository-code: {address}\n",
            text,
            flags=re.MULTILINE,
        )
    )
    path = root / "README.md"
    text = re.sub(
        r"(!\[[^\]]*\]\()(?!http)", rf"\1{address}/raw/main/", path.read_text()
    )
    text = text.replace(PLACEHOLDER, address)
    path.write_text(re.sub(r"(\]\()(?!http)", rf"\1{address}/blob/main/", text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tag",
        help="of the release, such as v0.2.0: then the changelog must have its date",
    )
    parser.add_argument(
        "--repository",
        help="address, to be written into pyproject.toml, CITATION.cff and README.md",
    )
    options = parser.parse_args()
    found = list(problems(options.tag))
    if options.repository:
        name(options.repository)
    sys.exit("\n".join(found) or None)


if __name__ == "__main__":
    main()
