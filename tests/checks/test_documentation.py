"""The documentation's links lead to files and headings that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/*.md"),
                 *ROOT.glob("tools/**/*.md"))
)  # fmt: skip

_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.*?) *$", re.MULTILINE)


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors that a rendered page has for its headings."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    slugs: list[str] = []
    for heading in _HEADING.findall(text):
        words = re.sub(r"\]\([^)]*\)|[`*\[]", "", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        slugs.append(slug if slug not in slugs else f"{slug}-{slugs.count(slug)}")
    return frozenset(slugs)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in _LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        is_there = target.exists() and target.is_relative_to(ROOT)
        if not is_there or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []
