"""The words that the project uses in a sense of its own are in the glossary."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documented import ROOT

PAGES = sorted((ROOT / "docs").glob("*.md"))
JARGON = {
    "acceptance length": "acceptance[ _]length",
    "baseline step": "baseline steps?",
    "drafter": "drafters?",
    "generation": "generations|a generation number|maps? the generation",
    "history": "history|histories",
    "home": "at home|homes?",
    "keyed noise": "keyed noise|noise is keyed",
    "label": "labels?",
    "ledger": "ledger",
    "live text": "live text",
    "off": "of off|off arm",
    "policy copy": "policy copy|copy of the policy",
    "probe": "probes?|probing",
    "problem": "problems?",
    "replica": "replicas?",
    "rollout": "rollouts?",
    "run-ahead": "run-ahead",
    "sealed": "seals?|sealed|sealing",
    "sibling": "siblings?",
    "spool": "spool",
    "stock": "stock",
    "trajectory": "trajectory|trajectories",
    "visit": "visits?|visited",
    "weight sync": "weight syncs?",
    "writer": "writer",
}
"""What a stranger would not know, and how it stands on pages."""


def prose(page: Path) -> str:
    """Return a page without what is not read: comments, code blocks and addresses."""
    text = re.sub(
        r"<!--.*?-->|^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    return re.sub(r"\]\([^)]*\)", "]", text)


def glossary() -> dict[str, str]:
    """Return the words of the glossary with their meaning."""
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \|$",
        (ROOT / "docs/glossary.md").read_text(),
        re.MULTILINE,
    )
    return {word: meaning for word, meaning in rows if word != "word"}


def pages_for_users() -> list[Path]:
    """Return the README and the pages that do not stand under Internals or Project."""
    _, nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")
    for_users, _ = nav.split("  - Internals:\n")
    names = re.findall(r": (\S+\.md)$", for_users, re.MULTILINE)
    assert names[0] == "index.md"
    return [ROOT / "README.md", *(ROOT / "docs" / name for name in names[1:])]


def test_what_users_read_is_short() -> None:
    words = sum(len(prose(page).split()) for page in pages_for_users())
    assert 5000 < words <= 17000


@pytest.mark.parametrize("page", pages_for_users(), ids=lambda page: page.stem)
def test_pages_for_users_have_no_words_of_internals(page: Path) -> None:
    text = re.sub(r"`[^`]+`", "", prose(page))
    found = re.findall(
        r"\b(?:stock|sealed|seals?|harvest\w*|spool|arena|visits?|siblings?)\b", text
    )
    assert not found, f"say it in the field's words: {found}"


def test_the_readme_is_two_screens() -> None:
    readme = ROOT / "README.md"
    assert len(readme.read_text().splitlines()) <= 125


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.stem != "glossary"],
    ids=lambda page: page.stem,
)
def test_the_glossary_explains_the_projects_words_that_a_page_uses(page: Path) -> None:
    text = prose(page)
    used = {
        term
        for term, form in JARGON.items()
        if re.search(rf"\b(?:{form})\b", text, re.IGNORECASE)
    }
    assert used <= set(glossary()), (
        f"put into docs/glossary.md: {used - set(glossary())}"
    )


def test_every_word_of_the_glossary_is_used_and_can_be_found() -> None:
    explained = glossary()
    assert list(explained) == sorted(explained, key=str.lower)
    assert set(explained) <= set(JARGON), (
        f"say in JARGON how it stands on pages: {set(explained) - set(JARGON)}"
    )
    text = "\n".join(prose(page) for page in PAGES if page.stem != "glossary")
    for term in explained:
        assert re.search(rf"\b(?:{JARGON[term]})\b", text, re.IGNORECASE), (
            f"no page uses {term}"
        )


def test_meanings_of_the_glossary_are_short() -> None:
    for term, meaning in glossary().items():
        assert 4 <= len(meaning.split()) <= 30, term
