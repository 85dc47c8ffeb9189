"""Pages are short, and the words that the project uses in a sense of its own are in the glossary."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documented import ROOT

PAGES = sorted((ROOT / "docs").glob("*.md"))
REFERENCE = {"block", "metrics", "troubleshooting", "commands", "figures", "simulation"}
"""Pages in which one looks something up, and which nobody reads from beginning to end."""
LONGEST = {"architecture": 1200, "support": 1000}
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
    text = re.sub(r"<!--.*?-->|^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", text)


def words(page: Path) -> int:
    """Count the words of a page: whatever has a letter or a digit."""
    return sum(1 for word in prose(page).split() if re.search(r"\w", word))


def glossary() -> dict[str, str]:
    """Return the words of the glossary with their meaning."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    return {word: meaning for word, meaning in rows if word != "word"}


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in REFERENCE], ids=lambda page: page.stem)
def test_a_page_is_read_in_a_few_minutes(page: Path) -> None:
    assert words(page) <= LONGEST.get(page.stem, 900)


def sentences(page: Path) -> list[str]:
    """Return the sentences of a page; a cell of a table ends one."""
    cells = re.split(r"\n\s*\n|^(?:[-*]|\d+\.|#+|>|\[\^\w+\]:) |\|", prose(page), flags=re.MULTILINE)
    return [sentence for cell in cells for sentence in re.split(r"(?<=[.!?])\s+", cell)]


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in REFERENCE], ids=lambda page: page.stem)
def test_a_sentence_is_read_in_one_breath(page: Path) -> None:
    long = [sentence for sentence in sentences(page) if len(sentence.split()) > 50]
    assert not long, "make two of it"


def test_the_readme_is_two_screens() -> None:
    readme = ROOT / "README.md"
    assert words(readme) <= 900 and len(readme.read_text().splitlines()) <= 125


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "glossary"], ids=lambda page: page.stem)
def test_the_glossary_explains_the_projects_words_that_a_page_uses(page: Path) -> None:
    text = prose(page)
    used = {term for term, form in JARGON.items() if re.search(rf"\b(?:{form})\b", text, re.IGNORECASE)}
    assert used <= set(glossary()), f"put into docs/glossary.md: {used - set(glossary())}"


def test_every_word_of_the_glossary_is_used_and_can_be_found() -> None:
    explained = glossary()
    assert len(explained) <= 25, "a word more is a word that a reader must learn"
    assert list(explained) == sorted(explained, key=str.lower)
    assert set(explained) <= set(JARGON), f"say in JARGON how it stands on pages: {set(explained) - set(JARGON)}"
    text = "\n".join(prose(page) for page in PAGES if page.stem != "glossary")
    for term in explained:
        assert re.search(rf"\b(?:{JARGON[term]})\b", text, re.IGNORECASE), f"no page uses {term}"


def test_meanings_of_the_glossary_are_short() -> None:
    for term, meaning in glossary().items():
        assert 4 <= len(meaning.split()) <= 30, term
