"""A team's own view in a real headless Chromium: its rows and requests, and nobody else's."""

import json
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from dashboard.admin_port import Desk, serving
from fairshare.core.priority import ServiceClass
from fairshare.gateway.identity import Identity
from gateway.statuses import budget_status, pool_status_of, team_status
from support.browser import chromium, opened

SEARCH_KEY = "fs-search-key"
OTHERS_BUDGET = re.compile(r"(?<![\d.])777(?!\d)")
"""The amount, and no part of a point in time."""

IDENTITIES = {
    SEARCH_KEY: Identity("search-key", "search", ServiceClass.INTERACTIVE, owners=("key:search-key", "team:search")),
    "fs-ads-key": Identity("ads-key", "ads-secret", ServiceClass.BATCH, owners=("key:ads-key", "team:ads-secret")),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def desk() -> Desk:
    search = team_status(
        "search", in_flight=8, held=2, oldest_held_seconds=1.5, usage=1234.0, level_fairshare=0.8, rank=1
    )
    ads = team_status("ads-secret", in_flight=8, held=7, usage=99.0, level_fairshare=1.2)
    pool = pool_status_of("chat", in_flight=16, held=9, saturated=True, teams=[search, ads])
    made = Desk(
        [pool, pool_status_of("hidden-pool", teams=[ads])],
        budgets=[
            budget_status("team:search", hard=100.0, used=25.0, left=75.0),
            budget_status("team:ads-secret", hard=777.0, used=1.0, left=776.0),
        ],
        identities=IDENTITIES,
        past_seconds=20,
    )
    made.admin_key = "the-admin-key"
    made.waited("search-request", "search", key_id="search-key")
    made.waited("ads-request", "ads-secret", key_id="ads-key")
    return made


def sign_in(page: Page, key: str) -> None:
    page.get_by_label("Your key").fill(key)
    page.get_by_role("button", name="Show").click()


def test_a_team_sees_its_own_rows_requests_and_budgets(browser: Browser) -> None:
    with serving(desk()) as url, opened(browser, f"{url}/team") as page:
        sign_in(page, SEARCH_KEY)
        expect(page.get_by_role("heading", name="fairshare · search")).to_be_visible()
        expect(page.locator(".sentence")).to_contain_text("2 requests of it wait, the oldest for 1.5 s")
        expect(page.locator("#budgets")).to_contain_text("75 left")
        page.get_by_role("button", name="search-request").click()
        expect(page.locator("#answer")).to_contain_text("16 of the 16 slots of pool chat were taken")
        expect(page.locator(".chart")).to_have_attribute("aria-label", re.compile("now owns 8 slots"))
        seen = page.content()
        assert "ads-secret" not in seen
        assert "ads-request" not in seen
        assert "hidden-pool" not in seen
        assert not OTHERS_BUDGET.search(seen)


def test_the_key_stays_in_the_tab_and_goes_when_its_owner_signs_out(browser: Browser) -> None:
    with serving(desk()) as url, opened(browser, f"{url}/team") as page:
        sign_in(page, SEARCH_KEY)
        expect(page.get_by_text("you own")).to_be_visible()
        page.reload()
        expect(page.get_by_text("you own")).to_be_visible()
        assert page.evaluate("JSON.stringify(localStorage) + document.cookie") == "{}"
        other_tab = page.context.new_page()
        other_tab.goto(f"{url}/team")
        expect(other_tab.get_by_label("Your key")).to_be_visible()
        assert SEARCH_KEY not in page.url
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("Your key")).to_be_focused()
        assert page.evaluate("sessionStorage.length") == 0
        assert "search-request" not in page.content()


def test_a_wrong_key_shows_nothing_and_too_many_are_refused(browser: Browser) -> None:
    with serving(desk()) as url, opened(browser, f"{url}/team", quiet=False) as page:
        sign_in(page, "fs-wrong")
        expect(page.get_by_role("alert")).to_contain_text("The key is not valid")
        assert page.evaluate("sessionStorage.length") == 0
        statuses = page.evaluate(
            "async () => { const s = []; for (let i = 0; i < 21; i++) s.push((await fetch('/api/v1/team', "
            "{ headers: { Authorization: 'Bearer fs-wrong' } })).status); return s }"
        )
        assert statuses[-1] == 429
        sign_in(page, "fs-wrong")
        expect(page.get_by_role("alert")).to_contain_text("Too many requests with keys that are not valid")
        sign_in(page, SEARCH_KEY)
        expect(page.get_by_text("you own")).to_be_visible()


def test_a_key_that_is_revoked_ends_the_view(browser: Browser) -> None:
    at = desk()
    with serving(at) as url, opened(browser, f"{url}/team", quiet=False) as page:
        sign_in(page, SEARCH_KEY)
        expect(page.get_by_text("you own")).to_be_visible()
        at.directory.replace({})
        expect(page.get_by_role("alert")).to_contain_text("The key is not valid")
        expect(page.locator("#own")).to_be_hidden()


def test_a_script_in_the_page_gets_nothing_of_others_with_a_team_s_key(browser: Browser) -> None:
    """Whoever has a team's key, and asks whatever the page could ask."""
    paths = [
        "/api/v1/team",
        "/api/v1/team?team=ads-secret",
        "/api/v1/team/history?pool=chat&team=ads-secret",
        "/api/v1/team/history?pool=chat&by=team",
        "/api/v1/team/history?pool=hidden-pool",
        "/api/v1/team/requests?team=ads-secret",
        "/api/v1/team/requests?most=200&only=waited",
        "/api/v1/team/explain?of=search",
        "/api/v1/team/explain?of=search-request",
        "/api/v1/team/explain?of=ads-request",
        "/api/v1/team/explain?of=ads-secret",
        "/api/v1/state",
        "/api/v1/live",
        "/api/v1/history?pool=chat&by=team",
        "/api/v1/requests",
        "/api/v1/explain?of=ads-request",
        "/api/v1/pools",
        "/metrics",
    ]
    with serving(desk()) as url, opened(browser, f"{url}/team", quiet=False) as page:
        answers = page.evaluate(
            """async (paths) => { const found = []; for (const path of paths) {
                const headers = { Authorization: "Bearer fs-search-key" };
                const answer = await fetch(path, { headers, credentials: "omit" });
                found.push([path, answer.status, await answer.text()]); } return found }""",
            paths,
        )
        for path, status, text in answers:
            asked_for = "ads-secret" in path or "ads-request" in path or "hidden-pool" in path
            said = json.loads(text).get("error", {}).get("message", "") if status >= 400 else text
            assert "ads-secret" not in said or (status == 404 and asked_for), path
            assert "ads-key" not in text, path
            assert not OTHERS_BUDGET.search(said), path
            if not path.startswith("/api/v1/team"):
                assert status in (401, 429), path
        by_path = {path: (status, text) for path, status, text in answers}
        assert by_path["/api/v1/team/explain?of=ads-request"][0] == 404
        assert by_path["/api/v1/team/explain?of=ads-secret"][0] == 404
        assert "ads-request" not in by_path["/api/v1/team/requests?most=200&only=waited"][1]
        assert list(json.loads(by_path["/api/v1/team/history?pool=chat&by=team"][1])["teams"]) == ["search"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone(browser: Browser, scheme: str) -> None:
    with serving(desk()) as url, opened(browser, f"{url}/team", width=360, height=740, scheme=scheme) as page:
        sign_in(page, SEARCH_KEY)
        expect(page.locator("canvas")).to_have_count(2)
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
