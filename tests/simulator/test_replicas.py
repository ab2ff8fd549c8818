"""Replicas of the gateway in virtual time: the machines of production between links, a store and deaths."""

from pathlib import Path

import msgspec
import pytest

from fairshare.simulator.outcome import Outcome
from fairshare.simulator.policies import PolicyName
from fairshare.simulator.report import figures, reign_texts
from fairshare.simulator.scenario import Scenario, ScenarioError, load, parse
from fairshare.simulator.world import World

THREE = """
title: three replicas
duration: 30s
warm_up: 2s
pools: [{capacity: 9, engines: {max_num_seqs: 9, headroom: 2}}]
replicas: {count: 3, link: LINK, longest_request: 10sFAIL}
teams:
  - {name: a, share: 2/3, loads: [{clients: 20, prompt: 50-150, output: 50-150}]}
  - {name: b, share: 1/3, loads: [{clients: 20, prompt: 50-150, output: 50-150}]}
"""


def three(link: str = "1ms", fail: str = "") -> Scenario:
    return parse(THREE.replace("LINK", link).replace("FAIL", f", fail: [{fail}]" if fail else ""))


def run(scenario: Scenario, policy: PolicyName = PolicyName.HOLD_RECALL) -> Outcome:
    return World(scenario, policy).run()


def test_healthy_replicas_on_links_without_delay_decide_as_one_gateway_does() -> None:
    shared, alone = three("0ms"), msgspec.structs.replace(three("0ms"), replicas=None)
    ran = [figures(run(scenario)).pools[0] for scenario in (shared, alone)]
    assert ran[0].output_tokens == pytest.approx(ran[1].output_tokens, rel=0.002)
    assert ran[0].slot_shortfall_points < 2.0


def test_the_farther_the_replicas_are_from_each_other_the_later_is_a_freed_seat_refilled() -> None:
    tokens = [figures(run(three(link))).pools[0].output_tokens for link in ("0ms", "20ms", "80ms")]
    assert tokens[0] > tokens[1] > tokens[2] > 0.8 * tokens[0]


def test_one_replica_decides_for_all_and_its_death_ends_that() -> None:
    outcome = run(three(fail="{at: 10s, lasting: 5s}"))
    begins, ends, next_begins = outcome.reigns
    assert (begins.at < 0.1, begins.replica) == (True, "replica-0")
    assert (ends.at, ends.replica) == (10.0, "")
    # The lease was renewed for five seconds within the second before.
    assert 14.0 <= next_begins.at <= 15.1
    assert next_begins.replica in ("replica-1", "replica-2")
    assert outcome.degraded_grants > 0
    found = figures(outcome)
    assert reign_texts(found)[0].startswith("pool pool was decided by replica-0 from 1")
    assert msgspec.json.decode(msgspec.json.encode(found))["reigns"][1] == {"at": 10.0, "pool": "pool", "replica": ""}


def test_what_a_dead_replica_had_is_lost_once_and_its_clients_ask_again() -> None:
    scenario = three(fail="{at: 10s, lasting: 5s}")
    outcome = run(scenario)
    teams = outcome.pools[0].teams.values()
    failed = sum(team.failed for team in teams)
    # In turn: a third of the forty clients' requests, more or less.
    assert 5 <= failed <= 25
    assert sum(team.submitted for team in teams) == sum(team.finished + team.failed for team in teams) + 40


def test_a_follower_that_dies_costs_its_requests_and_nobody_stops() -> None:
    outcome = run(three(fail="{at: 10s, which: 2, lasting: 5s}"))
    assert [reign.replica for reign in outcome.reigns] == ["replica-0"]
    assert outcome.degraded_grants == 0
    assert outcome.pools[0].idle_slot_seconds < 1.0


def test_new_requests_wait_for_an_owner_a_second_and_a_half_and_then_go_over_a_part_of_c() -> None:
    windows = run(three(fail="{at: 10s, lasting: 20s}")).pools[0].windows
    running = {round(end): sum(row) for end, row in zip(windows.ends, windows.running, strict=True)}
    assert running[11] < 4
    # Two survivors of three have three of nine slots each, once the borrowers that they had have ended.
    assert [running[second] for second in (13, 14)] == [6, 6]
    assert running[18] == 9


def test_where_no_replica_lives_clients_try_again_until_one_does() -> None:
    scenario = three(fail="{at: 10s, which: 0, lasting: 5s}")
    assert scenario.replicas is not None
    alone = msgspec.structs.replace(scenario, replicas=msgspec.structs.replace(scenario.replicas, count=1))
    pool = run(alone).pools[0]
    assert sum(team.refused for team in pool.teams.values()) > 40
    tokens = {round(end): sum(row) for end, row in zip(pool.windows.ends, pool.windows.output_tokens, strict=True)}
    assert tokens[12] == tokens[14] == 0
    assert tokens[20] > 0


def test_a_run_with_replicas_is_the_same_every_time() -> None:
    scenario = three("3ms", "{at: 10s, lasting: 5s}")
    first, second = (figures(run(scenario)) for _ in range(2))
    assert repr(first) == repr(second)


def test_recalls_reach_the_replica_that_has_the_request() -> None:
    text = THREE.replace("LINK", "2ms").replace("FAIL", "").replace("headroom: 2", "headroom: 1")
    text = text.replace(
        "{name: a, share: 2/3, loads: [{clients: 20,", "{name: a, share: 2/3, loads: [{clients: 6, on: 2s, off: 2s,"
    )
    text = text.replace("loads: [{clients: 20,", "loads: [{clients: 20, stream: false,")
    pool = run(parse(text)).pools[0]
    assert pool.recalls > 10
    assert [team.unfulfilled_returns for team in pool.teams.values()] == [0, 0]


def test_pools_that_fallback_joins_have_one_owner() -> None:
    text = (
        THREE.replace("LINK", "1ms")
        .replace("FAIL", "")
        .replace(
            "pools: [{", "pools: [{name: big, capacity: 4, engines: {max_num_seqs: 4}}, {name: small, fallback: big, "
        )
    )
    text = text.replace("loads: [{", "loads: [{pool: small, ")
    outcome = run(parse(text))
    assert [reign.pool for reign in outcome.reigns] == ["big"]
    ran = sum(sum(map(sum, pool.windows.slot_seconds)) for pool in outcome.pools) / 28.0
    assert ran > 12.0  # of 9 and 4: borrowers run in the pool that they fall back on


def test_a_lost_engine_is_lost_for_every_replica() -> None:
    text = THREE.replace("LINK", "1ms").replace("FAIL", "").replace("engines: {", "engines: {count: 3, ")
    text = text.replace("max_num_seqs: 9", "max_num_seqs: 3") + "changes: [{at: 10s, lose_engine: 1, lasting: 10s}]\n"
    windows = run(parse(text)).pools[0].windows
    running = {round(end): sum(row) for end, row in zip(windows.ends, windows.running, strict=True)}
    assert (running[8], running[15], running[25]) == (9, 6, 9)


def test_policies_that_are_not_hold_run_on_one_gateway_that_does_not_fail() -> None:
    outcome = run(three(fail="{at: 10s, lasting: 5s}"), PolicyName.PASS)
    assert outcome.reigns == []
    assert sum(team.failed for team in outcome.pools[0].teams.values()) == 0


def test_the_reservation_holds_again_after_an_owner_died_under_a_flood() -> None:
    scenario = load(Path(__file__).parents[2] / "scenarios" / "replicas.yaml")
    outcome = run(msgspec.structs.replace(scenario, duration=60.0))
    windows = outcome.pools[0].windows
    part = {round(end): row[0] / sum(row) for end, row in zip(windows.ends, windows.output_tokens, strict=True)}
    assert all(abs(part[second] - 0.75) < 0.01 for second in range(8, 21))
    assert part[27] > 0.7
    assert all(abs(part[second] - 0.75) < 0.05 for second in range(45, 61))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("count: 0", "replicas.count: Expected `int` >= 1, found '0'"),
        ("link: 2s", "replicas.link: must be at most 100ms, found 2000ms"),
        ("fail: [{at: 1s, which: 3}]", r"replicas.fail\[0\].which: must be below the number of replicas \(3\), from 0"),
        ("fail: [{at: 1s, which: nobody}]", "which"),
        ("fails: []", 'unknown key "fails"; the nearest known one is "fail"'),
        ("fail: [{at: 1s, last: 3s}]", 'unknown key "last"; the nearest known one is "lasting"'),
    ],
)
def test_what_cannot_be_simulated_is_said_with_its_place(found: str, message: str) -> None:
    text = THREE.replace("replicas: {count: 3, link: LINK, longest_request: 10sFAIL}", f"replicas: {{{found}}}")
    with pytest.raises(ScenarioError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("changes: [{at: 1s, phantoms: {a: 3}}]", r"changes\[0\]: phantoms and usage are what replicas find"),
        ("changes: [{at: 1s, usage: {a: 3}}]", r"changes\[0\]: phantoms and usage are what replicas find"),
        ("policies: [fcfs]", None),
    ],
)
def test_what_replicas_bring_about_themselves_is_not_given(given: str, message: str | None) -> None:
    text = THREE.replace("LINK", "1ms").replace("FAIL", "") + given + "\n"
    if message is None:
        assert parse(text).replicas is not None
        return
    with pytest.raises(ScenarioError, match=message):
        parse(text)


def test_adaptive_capacity_and_replicas_are_not_simulated_together() -> None:
    text = THREE.replace("LINK", "1ms").replace("FAIL", "").replace("capacity: 9,", "capacity: 9, trim: true,")
    with pytest.raises(ScenarioError, match=r"pools\[0\].trim: cannot be simulated together with replicas"):
        parse(text)
