"""The status page in a real headless Chromium: what it shows, how it is used, and what it never does."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from dashboard.admin_port import Desk, serving
from fairshare.gateway.status import FindingStatus, PoolStatus
from gateway.statuses import budget_status, instance_status, pool_status_of, team_status
from support.browser import chromium, opened

HOSTILE = '<img src=x onerror="document.title=1">'


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def busy(second: int = 0) -> list[PoolStatus]:
    """Two teams in a full pool: `ads` has come back, `search` borrows a little less each second."""
    borrowed = second % 6
    search = team_status(
        "search",
        share=0.625,
        reserved=10,
        in_flight=10 + borrowed,
        borrowing=borrowed,
        held=14,
        oldest_held_seconds=1.8,
        usage=48_400.0,
        level_fairshare=0.797,
        rank=1,
    )
    ads = team_status(
        "ads", share=0.375, reserved=6, in_flight=6 - borrowed, held=4, usage=12_500.0, level_fairshare=1.74
    )
    engines = [instance_status(f"http://10.0.0.{n}:8000", in_flight=8, running=8, kv_usage=0.4) for n in (1, 2)]
    return [
        pool_status_of(
            "chat",
            in_flight=16,
            held=18,
            saturated=True,
            teams=[ads, search],
            instances=engines,
            recalls=3,
            turn_slots=0,
        )
    ]


def out_of_order() -> list[PoolStatus]:
    down = instance_status(
        "http://10.0.0.2:8000",
        healthy=False,
        part=0,
        seats=None,
        running=None,
        waiting=None,
        kv_usage=None,
        preemptions=None,
    )
    finding = FindingStatus(
        id="instance-out",
        severity="error",
        instance=down.id,
        sentence="http://10.0.0.2:8000 of pool chat gets no requests: /health answers 503.",
        why="The capacity is smaller meanwhile.",
        fix="Start the engine, or look at its log with `journalctl`.",
    )
    return [
        pool_status_of(
            "chat",
            capacity=8,
            teams=[team_status("search", in_flight=8, held=3)],
            instances=[instance_status("http://10.0.0.1:8000"), down],
            finding_details=[finding],
        )
    ]


def expect_no_sideways_scroll(page: Page) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_an_idle_pool_shows_who_owns_what(browser: Browser) -> None:
    pool = pool_status_of("chat", teams=[team_status("search"), team_status("ads")])
    with serving(Desk([pool])) as url, opened(browser, url) as page:
        expect(page.get_by_role("status")).to_have_text("live")
        expect(page.get_by_role("heading", name="chat")).to_be_visible()
        expect(page.get_by_role("row", name=re.compile("search"))).to_contain_text("idle")
        for column in ("share", "owns", "in flight", "borrowing", "held", "usage", "LF", "rank"):
            expect(page.get_by_role("columnheader", name=column, exact=True).first).to_be_visible()
        expect(page.locator("#problems")).to_be_hidden()
        expect(page.locator("#kept")).to_contain_text("in memory only")
        expect(page.locator(".pool .sentence")).to_have_text("Idle: all 16 slots are free, nobody waits.")
        assert page.title() == "fairshare"


def test_a_gateway_without_pools_or_teams_is_an_empty_page_that_says_so(browser: Browser) -> None:
    with serving(Desk([pool_status_of("chat")])) as url, opened(browser, url) as page:
        expect(page.get_by_text("No team owns a share here, and nobody asks.")).to_be_visible()
        expect(page.get_by_text("None so far.")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1360, 900), (360, 740)])
def test_a_busy_pool_shows_numbers_and_pictures_on_every_screen(
    browser: Browser, scheme: str, width: int, height: int
) -> None:
    desk = Desk(busy(), past_seconds=120, past=busy)
    desk.waited("request-1", "search")
    with serving(desk) as url, opened(browser, url, width=width, height=height, scheme=scheme) as page:
        row = page.get_by_role("row", name=re.compile("search")).first
        expect(row).to_contain_text("14 waiting, oldest 1.8 s", use_inner_text=width < 1180)
        expect(row).to_contain_text("48.4K")
        expect(page.get_by_text("16 of 16, saturated")).to_be_visible()
        expect(page.locator(".pool .sentence")).to_have_text(
            "All 16 slots are taken, 18 requests of ads and search wait. Every team that waits has all that it owns "
            "in flight."
        )
        expect(page.locator("canvas")).to_have_count(2)
        # Two minutes of history were there before the page was opened.
        expect(page.locator(".chart")).to_have_attribute("aria-label", re.compile("most waiting 18 since"))
        colours = page.evaluate(
            """() => { const canvas = document.querySelector("canvas"); const at = canvas.getContext("2d")
                .getImageData(0, 0, canvas.width, canvas.height).data; const seen = new Set();
                for (let i = 0; i < at.length; i += 4) seen.add([at[i], at[i + 1], at[i + 2]].join());
                return seen.size }"""
        )
        assert colours > 3, "the chart is empty"
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 18, 22)"
        assert dark == (scheme == "dark")
        expect_no_sideways_scroll(page)


def test_a_team_that_waits_for_what_it_owns_is_said_at_the_top(browser: Browser) -> None:
    teams = [
        team_status("search", in_flight=11, borrowing=3, held=2),
        team_status("ads", in_flight=5, held=1),
        *(team_status(f"team-{n}", reserved=0, held=1) for n in range(3)),
    ]
    desk = Desk([pool_status_of("chat", in_flight=16, held=6, teams=teams)])
    with serving(desk) as url, opened(browser, url) as page:
        sentence = page.locator(".pool .sentence")
        expect(sentence).to_have_text(
            "All 16 slots are taken, 6 requests of 5 teams wait. ads waits with fewer slots in flight than owned: only "
            "a request of several slots should. 3 slots are borrowed by search."
        )
        expect(sentence).to_have_class("sentence warn")
        desk.pools = [pool_status_of("chat", capacity=0, held=1, teams=teams)]
        expect(sentence).to_have_text("No engine is healthy: nothing runs, and 1 request waits.")


def test_the_chart_follows_the_chosen_team_and_span(browser: Browser) -> None:
    with serving(Desk(busy(), past_seconds=30, past=busy)) as url, opened(browser, url) as page:
        chart = page.locator(".chart")
        expect(chart).to_have_attribute("aria-label", re.compile("now owns 16 slots"))
        page.get_by_role("button", name="ads").click()
        expect(chart).to_have_attribute("aria-label", re.compile("now owns 6 slots"))
        expect(page.get_by_label("Whose picture: pool chat")).to_have_value("ads")
        page.get_by_role("button", name="2 h").click()
        expect(page.get_by_role("button", name="2 h")).to_have_attribute("aria-pressed", "true")
        expect(chart).to_have_attribute("aria-label", re.compile("now owns 6 slots"))


def test_everything_can_be_done_from_the_keyboard(browser: Browser) -> None:
    desk = Desk(busy())
    desk.waited("request-1", "search")
    with serving(desk) as url, opened(browser, url) as page:
        expect(page.get_by_role("button", name="request-1")).to_be_visible()
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "To the pools"
        sort = page.get_by_role("button", name="held", exact=True)
        sort.focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("columnheader", name="held")).to_have_attribute("aria-sort", "descending")
        first = page.locator(".pool tbody tr").first
        expect(first).to_contain_text("search")
        outline = sort.evaluate("node => getComputedStyle(node).outlineStyle")
        assert outline == "solid", "what has the focus must be seen"
        page.get_by_label("A request's id").focus()
        page.keyboard.type("search")
        page.keyboard.press("Enter")
        expect(page.locator("#answer")).to_contain_text("search owns 10 of the 16 slots of pool chat")
        reached = set[str]()
        for _ in range(40):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.textContent"))
        assert {"request-1", "/metrics"} <= reached


def test_a_request_that_waited_is_explained_in_numbers(browser: Browser) -> None:
    desk = Desk(busy())
    desk.waited("request-1", "search")
    with serving(desk) as url, opened(browser, url) as page:
        page.get_by_role("button", name="request-1").click()
        answer = page.locator("#answer")
        expect(answer).to_contain_text(
            "16 of the 16 slots of pool chat were taken, and 2 requests of its own team waited"
        )
        expect(answer).to_contain_text("Its rank was 1")
        expect(answer).to_contain_text("40 prompt and 60 completion tokens, charged 160 cost units")


def test_what_nobody_knows_is_a_plain_sentence(browser: Browser) -> None:
    with serving(Desk(busy())) as url, opened(browser, url, quiet=False) as page:
        page.get_by_label("A request's id").fill("no-such-request")
        page.get_by_role("button", name="Explain").click()
        expect(page.locator("#answer")).to_contain_text("Nothing is known of a request or team 'no-such-request'")


def test_problems_say_what_is_wrong_why_it_matters_and_what_to_do(browser: Browser) -> None:
    desk = Desk(out_of_order())
    with serving(desk) as url, opened(browser, url) as page:
        problem = page.locator("#problems li")
        expect(problem).to_contain_text(
            "Problem: http://10.0.0.2:8000 of pool chat gets no requests: /health answers 503."
        )
        expect(problem).to_contain_text("The capacity is smaller meanwhile.")
        expect(problem).to_contain_text("What to do: Start the engine, or look at its log with journalctl.")
        expect(page.get_by_role("row", name=re.compile(r"10\.0\.0\.2"))).to_contain_text("unhealthy")
        expect(page.get_by_role("row", name=re.compile(r"10\.0\.0\.2"))).to_contain_text("instance-out")
        desk.pools = busy()
        expect(page.locator("#problems")).to_be_hidden()


def test_budgets_show_what_is_left(browser: Browser) -> None:
    budgets = [
        budget_status("team:search", hard=1000.0, used=900.0, left=100.0),
        budget_status("team:ads", hard=500.0, used=500.0, left=0.0, model="tiny"),
    ]
    with serving(Desk(busy(), budgets=budgets)) as url, opened(browser, url) as page:
        section = page.locator("#budgets")
        expect(section).to_contain_text("900 of 1K used this month · 100 left")
        expect(section.locator("li.bad")).to_contain_text("model tiny")
        expect(page.get_by_role("row", name=re.compile("search")).first).to_contain_text("10%")


def test_a_hundred_teams_are_sorted_filtered_and_shown_in_parts(browser: Browser) -> None:
    teams = [
        team_status(f"team-{n:03}", share=0.01, reserved=0, in_flight=int(n == 50), held=n, usage=float(n))
        for n in range(100)
    ]
    pool = pool_status_of("chat", teams=teams)
    with serving(Desk([pool])) as url, opened(browser, url) as page:
        rows = page.locator(".pool table").first.locator("tbody tr:visible")
        expect(rows).to_have_count(25)
        expect(rows.first).to_contain_text("team-050")  # of so many teams the busiest are first
        page.get_by_role("button", name="held", exact=True).click()
        expect(rows.first).to_contain_text("team-099")
        page.get_by_label("Filter the teams of chat").fill("042")
        expect(rows).to_have_count(1)
        page.get_by_label("Filter the teams of chat").fill("")
        page.get_by_role("button", name="Show 75 more teams").click()
        expect(rows).to_have_count(100)
        page.set_viewport_size({"width": 360, "height": 740})
        expect_no_sideways_scroll(page)


def test_many_pools_are_seen_at_a_glance(browser: Browser) -> None:
    pools = [
        *busy(),
        pool_status_of("batch", in_flight=3, instances=[instance_status("http://10.0.0.9:8000", healthy=False)]),
    ]
    with serving(Desk(pools)) as url, opened(browser, url) as page:
        glance = page.get_by_label("Pools at a glance").get_by_role("link")
        expect(glance).to_have_count(2)
        expect(glance.nth(0)).to_contain_text("16 of 16 slots · 18 waiting")
        expect(glance.nth(1)).to_contain_text("0 of 1 engines healthy")
        glance.nth(1).click()
        expect(page.get_by_role("heading", name="batch")).to_be_in_viewport()


def test_names_that_are_markup_are_shown_as_they_are(browser: Browser) -> None:
    teams = [team_status(HOSTILE, held=1), team_status("'\"`;--\u202e\u0000</script>"), team_status("x" * 300)]
    finding = FindingStatus(id=HOSTILE, severity="error", instance=HOSTILE, sentence=HOSTILE, why=HOSTILE, fix=HOSTILE)
    pool = pool_status_of(
        HOSTILE, teams=teams, models=[HOSTILE], instances=[instance_status(HOSTILE)], finding_details=[finding]
    )
    desk = Desk([pool], budgets=[budget_status(f"team:{HOSTILE}", hard=1.0, used=0.0, left=1.0)])
    desk.waited(HOSTILE, HOSTILE, pool=HOSTILE)
    with serving(desk) as url, opened(browser, url, width=360, height=740) as page:
        expect(page.get_by_role("heading", name=HOSTILE).first).to_be_visible()
        page.get_by_role("button", name=HOSTILE).last.click()
        expect(page.locator("#answer")).to_contain_text(f"by team {HOSTILE}")
        assert page.locator("img[src=x]").count() == 0
        assert page.title() == "fairshare"
        expect_no_sideways_scroll(page)


def test_a_gateway_that_goes_away_and_comes_back_is_said_and_followed(browser: Browser) -> None:
    first = serving(Desk(busy()))
    url = first.__enter__()
    with opened(browser, url, quiet=False) as page:
        expect(page.get_by_role("status")).to_have_text("live")
        first.__exit__(None, None, None)
        expect(page.get_by_role("alert")).to_contain_text("The gateway does not answer")
        expect(page.get_by_role("row", name=re.compile("search")).first).to_be_visible()
        with serving(Desk(out_of_order()), port=int(url.rpartition(":")[2])):
            expect(page.get_by_role("status")).to_have_text("live")
            expect(page.locator("#trouble")).to_be_hidden()
            expect(page.locator("#problems")).to_be_visible()


def test_nothing_moves_for_those_who_do_not_want_it(browser: Browser) -> None:
    with serving(Desk(busy())) as url, opened(browser, url) as page:
        page.emulate_media(reduced_motion="reduce")
        assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_their_ground(browser: Browser, scheme: str) -> None:
    desk = Desk(out_of_order(), budgets=[budget_status("team:search", hard=1.0, used=1.0, left=0.0)])
    desk.waited("request-1", "search")
    with serving(desk) as url, opened(browser, url, scheme=scheme) as page:
        expect(page.get_by_role("button", name="request-1")).to_be_visible()
        poor = page.evaluate(CONTRAST)
        assert poor == []


CONTRAST = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = numbers(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const node of document.querySelectorAll("body *")) {
    const hasText = [...node.childNodes].some((each) => each.nodeType === 3 && each.textContent.trim());
    if (!node.checkVisibility() || !hasText) continue;
    const [a, b] = [light(numbers(getComputedStyle(node).color)), light(ground(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${node.tagName} ${node.className} ${node.textContent.slice(0, 30)}: ${ratio}`);
  }
  return poor;
}"""
"""Every visible text with a contrast below 4.5 to 1 (WCAG 2.2, 1.4.3)."""
