"""Snapshots of pools, from real pools and queues."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from fairshare.core.decisions import Instance, Mode, Request, Send
from fairshare.core.dispatch import make_queue
from fairshare.core.pool import Pool
from fairshare.core.priority import MAX_RANK
from fairshare.gateway.findings import Finding, Severity
from fairshare.gateway.options import InstanceSpec, PoolSpec
from fairshare.gateway.status import InstanceReport, PoolStatus, pool_status

URL = "http://a:1"


class Watched:
    """A supervision that says what it was told to say."""

    def __init__(self, *reports: InstanceReport, found: Sequence[Finding] = ()) -> None:
        self._reports, self._found = reports, found

    def reports(self) -> Sequence[InstanceReport]:
        return self._reports

    def found(self) -> Sequence[Finding]:
        return self._found


class Site:
    """One pool of four slots; `red` owns two, `blue` owns two."""

    def __init__(self, mode: Mode = Mode.HOLD, **spec: Any) -> None:
        self.now = 100.0
        self.spec = PoolSpec(
            name="chat",
            capacity=4,
            half_life_seconds=0.0,
            shares={"red": Fraction(1, 2), "blue": Fraction(1, 2)},
            models={"zeta": "z", "alpha": "a"},
            instances=(InstanceSpec(url=URL),),
            mode=mode,
            **spec,
        )
        self.pool = Pool("chat", 4, self.spec.shares, 0.0, lambda: self.now)
        self.queue = make_queue(self.pool, mode, instances=[Instance(id=URL, part_slots=4, seats=4)])
        self._number = 0

    def submit(self, team: str, *, slots: int = 1) -> str:
        self._number += 1
        self.queue.submitted(Request(id=str(self._number), team=team, slots=slots))
        return str(self._number)

    def status(self, supervision: Watched | None = None) -> PoolStatus:
        return pool_status(
            self.spec, self.pool, self.queue, supervision or Watched(InstanceReport(id=URL, healthy=True))
        )

    def team(self, name: str) -> Any:
        return next(team for team in self.status().teams if team.team == name)


def test_an_idle_pool_shows_who_owns_what() -> None:
    status = Site().status()
    assert (status.name, status.capacity, status.configured_capacity, status.dispatch) == ("chat", 4, 4, "hold")
    assert (status.in_flight, status.held, status.saturated, status.recalls) == (0, 0, False, 0)
    assert [(team.team, team.share, team.reserved, team.level_fairshare) for team in status.teams] == [
        ("blue", 0.5, 2, None),
        ("red", 0.5, 2, None),
    ]
    assert status.models == ["alpha", "zeta"]


def test_what_runs_borrows_and_waits_is_shown_by_team() -> None:
    site = Site()
    for _ in range(6):
        site.submit("red")
    site.now += 2.5
    red = site.team("red")
    assert (red.in_flight, red.borrowing, red.held, red.oldest_held_seconds) == (4, 2, 2, 2.5)
    status = site.status()
    assert (status.in_flight, status.held, status.saturated) == (4, 2, True)
    assert status.instances[0].in_flight == 4


def test_usage_makes_a_level_fairshare_and_a_rank() -> None:
    site = Site()
    site.queue.released(site.submit("red"), 10.0)
    red, blue = site.team("red"), site.team("blue")
    assert (red.usage, red.level_fairshare, red.rank) == (10.0, 0.5, 1)
    assert (blue.usage, blue.level_fairshare, blue.rank) == (0.0, None, 0)


def test_a_team_without_a_share_shows_while_it_waits_only() -> None:
    site = Site()
    for _ in range(4):
        site.submit("red")
    request = site.submit("stranger")
    stranger = site.team("stranger")
    assert (stranger.share, stranger.held, stranger.rank, stranger.level_fairshare) == (0.0, 1, MAX_RANK, 0.0)
    site.queue.cancelled(request)
    assert [team.team for team in site.status().teams] == ["blue", "red"]


def test_phantoms_saturate_a_pool_and_are_not_in_flight() -> None:
    site = Site()
    site.pool.add_phantoms("red", 4, until=200.0)
    status = site.status()
    assert (status.in_flight, status.saturated, site.team("red").phantoms) == (0, True, 4)


def test_observe_shows_what_would_wait() -> None:
    site = Site(Mode.OBSERVE)
    for _ in range(6):
        (decision,) = site.queue.submitted(Request(id=f"r{_}", team="red"))
        assert isinstance(decision, Send)
    status = site.status()
    assert (status.dispatch, status.in_flight, status.held) == ("observe", 6, 2)


def test_an_instance_shows_what_is_known_and_none_for_what_is_not() -> None:
    site = Site()
    reports = (
        InstanceReport(id=URL, healthy=True, running=3, waiting=1, kv_usage=0.5, version="0.32.0"),
        InstanceReport(id="http://unknown:1", healthy=False),
    )
    known, unknown = site.status(Watched(*reports)).instances
    assert (known.part, known.seats, known.running, known.waiting, known.kv_usage) == (4, 4, 3, 1, 0.5)
    assert (known.version, known.healthy) == ("0.32.0", True)
    assert (unknown.part, unknown.seats, unknown.running, unknown.version, unknown.healthy) == (
        0,
        None,
        None,
        None,
        False,
    )


def test_findings_are_those_of_the_watch_and_what_the_pool_itself_shows() -> None:
    fire = Finding(
        id="fire",
        severity=Severity.ERROR,
        pool="chat",
        instance_id=URL,
        sentence="The engine is on fire.",
        why="It will not last.",
        fix="Put it out.",
    )
    status = Site().status(Watched(found=[fire]))
    assert status.findings[0] == "The engine is on fire. Put it out."
    assert "not calibrated" in status.findings[1]
    assert [(detail.id, detail.severity, detail.instance) for detail in status.finding_details] == [
        ("fire", "error", URL),
        ("not-calibrated", "note", None),
    ]
    assert Site(calibrated=True).status().findings == []
    smaller = Site(calibrated=True)
    smaller.pool.set_capacity(3)
    assert smaller.status().findings[0].startswith("The capacity is 3 of the 4 configured slots")
