"""Which instances belong to a pool: plain examples, and what holds whatever sources, engines and operators do."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairshare.gateway.discovery.fleet import FORGOTTEN_SECONDS, HELD_SECONDS, Fleet, Named, SourceState, State
from fairshare.gateway.instances import FORGIVEN_SECONDS, LONGEST_OUT_SECONDS
from fairshare.gateway.options import InstanceSpec


def engines(names: str) -> list[InstanceSpec]:
    return [InstanceSpec(url=f"http://{name}:80") for name in names]


def letters(members: Iterable[InstanceSpec]) -> str:
    return "".join(member.url[7] for member in members)


def ids(names: str) -> set[str]:
    return {engine.id for engine in engines(names)}


class World:
    """A fleet with one source; everything that belongs to it accepts requests unless it is told otherwise."""

    def __init__(self, configured: str = "", *, missing_seconds: float = 0.0) -> None:
        self.now = 1000.0
        self.source = SourceState(name="the source", missing_seconds=missing_seconds)
        self.fleet = Fleet("chat", engines(configured), [self.source])
        self.members = ""
        self.sick = ""

    def answers(self, names: str) -> str:
        self.source.answer(engines(names), self.now)
        return self.step()

    def step(self, seconds: float = 0.0) -> str:
        self.now += seconds
        healthy = ids("".join(name for name in self.members if name not in self.sick))
        self.members = letters(self.fleet.step(self.now, healthy))
        return self.members

    def found(self) -> list[str]:
        return [finding.id for finding in self.fleet.found()]


def test_members_are_what_is_configured_then_what_sources_name_in_the_order_of_their_names() -> None:
    world = World("z")
    assert world.step() == "z"
    assert world.answers("ba") == "zab"
    assert world.answers("b") == "zb"


def test_what_a_source_no_longer_names_leaves_at_once_if_its_answers_are_whole_and_later_if_they_may_be_parts() -> None:
    whole, parts = World(), World(missing_seconds=30.0)
    assert whole.answers("ab") == parts.answers("ab") == "ab"
    assert whole.answers("a") == "a"
    assert parts.answers("a") == "ab"
    assert parts.step(29.0) == "ab"
    assert parts.step(1.0) == "a"


def test_a_source_that_answers_with_parts_in_turn_loses_nothing() -> None:
    world = World(missing_seconds=30.0)
    for _ in range(20):
        world.answers("abc")
        world.step(10.0)
        assert world.answers("bcd") in {"abcd"}
        world.step(10.0)
    assert world.members == "abcd"


def test_an_empty_answer_empties_no_pool_for_five_minutes_and_is_said() -> None:
    world = World()
    world.answers("ab")
    assert world.answers("") == "ab"
    assert world.found() == ["instances-kept"]
    assert world.step(HELD_SECONDS - 1.0) == "ab"
    assert world.step(1.0) == ""
    assert world.found() == ["pool-empty"]


def test_old_instances_stay_until_one_of_the_new_ones_accepts_requests() -> None:
    world = World()
    world.answers("ab")
    world.sick = "cd"
    assert world.answers("cd") == "cdab"
    assert world.step(60.0) == "cdab"
    world.sick = "d"
    assert world.step(1.0) == "cd"


def test_an_answer_that_was_wrong_for_a_moment_changes_nothing() -> None:
    world = World()
    world.answers("ab")
    world.answers("")
    world.step(HELD_SECONDS - 1.0)
    assert world.answers("ab") == "ab"
    world.answers("")
    assert world.step(HELD_SECONDS - 1.0) == "ab", "the five minutes begin anew"


def test_an_instance_that_flaps_waits_longer_each_time_and_at_most_a_minute() -> None:
    world = World()
    world.answers("ab")
    waits: list[float] = []
    for _ in range(9):
        world.answers("a")
        assert world.members == "a"
        world.answers("ab")
        left_at = world.now
        while world.members != "ab":
            world.step(0.25)
        waits.append(world.now - left_at)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_staying_a_minute_halves_the_wait_again() -> None:
    world = World()
    world.answers("ab")
    for _ in range(4):
        world.answers("a")
        world.answers("ab")
        world.step(LONGEST_OUT_SECONDS)
    world.step(2 * FORGIVEN_SECONDS)
    world.answers("a")
    world.answers("ab")
    # It had left four times, stayed for two minutes, and left once more: as if it were the third time.
    assert world.step(3.0) == "a"
    assert world.step(1.0) == "ab"


def test_one_that_flaps_need_not_wait_while_no_other_accepts_requests() -> None:
    world = World()
    world.answers("ab")
    for _ in range(5):
        world.answers("a")
        world.answers("ab")
        world.step(LONGEST_OUT_SECONDS)
    world.answers("a")
    world.sick = "a"
    assert world.answers("ab") == "ab"


def test_a_source_that_fails_keeps_what_it_said_last_however_long() -> None:
    world = World(missing_seconds=30.0)
    world.answers("ab")
    world.answers("a")
    world.source.trouble = "nobody answers"
    assert world.step(86400.0) == "ab"
    assert world.found() == ["source-failed"]
    assert world.answers("a") == "a", "it was missing for longer than it may be"
    assert world.found() == []


def test_a_source_that_never_answered_brings_nothing_and_both_are_said() -> None:
    world = World()
    world.source.trouble = "nobody answers"
    assert world.step() == ""
    assert world.found() == ["source-failed", "pool-empty"]


def test_operators_are_obeyed_at_once() -> None:
    world = World("a")
    world.answers("b")
    assert world.fleet.drain("http://b:80")
    assert not world.fleet.drain("http://b:80")
    assert world.step() == "a"
    assert world.found() == ["instances-drained"]
    assert world.answers("b") == "a"
    assert world.fleet.add(*engines("b"))
    assert world.step() == "ab"
    assert world.fleet.add(*engines("c"))
    assert not world.fleet.add(*engines("c"))
    assert world.step() == "abc"
    assert world.fleet.remove("http://c:80")
    assert not world.fleet.remove("http://c:80")
    assert world.step() == "ab"
    assert world.found() == []


def test_the_list_says_who_names_what() -> None:
    world = World("a")
    world.answers("abc")
    world.fleet.drain("http://c:80")
    world.fleet.add(*engines("d"))
    world.step()
    assert world.fleet.named() == [
        Named("http://a:80", State.MEMBER, ("the configuration", "the source")),
        Named("http://b:80", State.MEMBER, ("the source",)),
        Named("http://c:80", State.DRAINED, ("the source",)),
        Named("http://d:80", State.MEMBER, ("an operator",)),
    ]
    world.answers("ac")
    world.answers("abc")
    world.step()
    assert world.fleet.named()[1].state is State.WAITING


def test_a_reload_that_drops_a_source_drops_its_instances_when_others_accept_and_keeps_what_operators_did() -> None:
    world = World("a")
    world.answers("b")
    world.fleet.add(*engines("c"))
    world.step()
    world.fleet.reconfigure(engines("d"), [])
    world.sick = "d"
    assert world.step() == "dc"


def test_what_left_long_ago_is_forgotten() -> None:
    world = World("a")
    for number in range(50):
        world.source.answer([InstanceSpec(url=f"http://x{number}:80")], world.now)
        world.step(FORGOTTEN_SECONDS / 10)
    assert len(vars(world.fleet)["_left"]) <= 11


NAMES = st.sets(st.sampled_from("abcd")).map(lambda names: "".join(sorted(names)))
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["answer", "fail", "sick", "wait", "drain", "add", "remove"]),
        NAMES,
        st.sampled_from([0.0, 0.5, 1.0, 5.0, 31.0, 301.0]),
    ),
    max_size=40,
)


@pytest.mark.parametrize("missing_seconds", [0.0, 30.0])
@given(steps=STEPS)
def test_whatever_happens_no_source_takes_the_last_healthy_instance_at_once_and_nobody_stays_unnamed_for_long(
    missing_seconds: float, steps: list[tuple[str, str, float]]
) -> None:
    world = World(missing_seconds=missing_seconds)
    unnamed_since: dict[str, float] = {}
    for what, names, seconds in steps:
        before = world.members
        match what:
            case "answer":
                world.source.answer(engines(names), world.now)
            case "fail":
                world.source.trouble = "no answer"
            case "sick":
                world.sick = names
            case "drain" | "remove":
                for name in names:
                    (world.fleet.drain if what == "drain" else world.fleet.remove)(f"http://{name}:80")
            case "add":
                for engine in engines(names):
                    world.fleet.add(engine)
            case _:
                pass
        after = world.step(seconds)
        drained = {instance_id[7] for instance_id in world.fleet.drained}
        assert not drained & set(after), "whom operators drained is out"
        named = {each.id[7] for each in world.fleet.named() if each.named_by} - drained
        accepted = set(before) - set(world.sick)
        if what not in {"drain", "remove"} and seconds < HELD_SECONDS and accepted and not unnamed_since:
            assert set(after) & accepted, "one answer must not take the last instance that gets requests"
        assert {engine[7] for engine in world.fleet.added} <= set(after) | drained, "what operators add belongs at once"
        for name in set(after) - named:
            since = unnamed_since.setdefault(name, world.now)
            assert world.now - since < HELD_SECONDS, "what nothing names belongs for five minutes at most"
        unnamed_since = {name: since for name, since in unnamed_since.items() if name in set(after) - named}
