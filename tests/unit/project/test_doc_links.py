"""The pages link to pages, headings and files that exist. docs/index.md links to each page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]


def prose(page: Path) -> str:
    """Returns the text of a page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"\w+://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize("page", [DOCS / "architecture.md", *sorted((DOCS / "design").glob("*.md"))], ids=name)
def test_files_that_a_page_names_exist(page):
    named = re.findall(r"`([\w/.-]+\.(?:py|cpp|patch|json))`", prose(page))
    missing = [file for file in named if not any((folder / file).exists() for folder in (ROOT, ROOT / "llamabatch"))]
    assert missing == []


def test_each_decision_has_its_four_parts():
    for page in (DOCS / "design").glob("*.md"):
        for decision in page.read_text(encoding="utf-8").split("\n## ")[1:]:
            found = re.findall(r"^\*\*(\w+)\.\*\*", decision, flags=re.M)
            assert found == ["Problem", "Decision", "Price", "Evidence"], f"{page.name}: {decision.splitlines()[0]}"


def test_each_page_is_at_most_two_links_from_the_index():
    index = linked(DOCS / "index.md")
    reached = index.union(*map(linked, index))
    assert [name(page) for page in DOCS.rglob("*.md") if page not in {*reached, DOCS / "index.md"}] == []


def linked(page: Path) -> set[Path]:
    """Returns the pages of docs/ that a page links to."""
    files = {(page.parent / target).resolve() for target in re.findall(r"\]\(([^)#\s]+\.md)[)#]", prose(page))}
    return {file for file in files if file.is_relative_to(DOCS)}
