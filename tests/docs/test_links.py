"""Every link of every page leads to a page, and its anchor to a heading: in the repository and in the site."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
SITE = ROOT / "docs" / "site" / "conf.py"


def prose(text: str) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors(text: str) -> set[str]:
    """What the headings of a page are called, as the repository's host and the site call them."""
    found: dict[str, int] = {}
    names: set[str] = set()
    headings = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#{1,4} +(.+?) *$", headings, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        names.add(f"{slug}-{found[slug]}" if slug in found else slug)
        found[slug] = found.get(slug, 0) + 1
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_something_and_its_anchor_to_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text("utf-8"))):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        there = page.parent / name if name else page
        assert there.exists(), f"{target}: nothing is there"
        if anchor:
            assert anchor in anchors(there.read_text("utf-8")), f"{target}: no heading is called so"


def test_every_page_of_the_site_links_only_to_what_the_site_can_show() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        for target in re.findall(r"\]\(([^)\s#]+)", prose(page.read_text("utf-8"))):
            if "://" not in target:
                assert (page.parent / target).is_file(), (
                    f"{page.name}: {target} is no file, so the site has no page for it"
                )


def test_the_start_page_of_the_site_leads_to_every_kind_of_page() -> None:
    kinds = next(
        ast.literal_eval(node.value)
        for node in ast.parse(SITE.read_text()).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "KINDS"
    )
    index = (ROOT / "docs" / "index.md").read_text()
    linked = {target for target in re.findall(r"\]\(([^)\s#]+)", index) if target.endswith(".md")}
    for kind, patterns in kinds.items():
        assert any(Path(name).match(pattern) for name in linked for pattern in patterns), f"nothing leads to {kind}"
