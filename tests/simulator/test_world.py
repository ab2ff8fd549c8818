"""Virtual time: what a world must keep to, whatever runs in it."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairshare.gateway.instances import CHECK_SECONDS, SCRAPE_EVERY
from fairshare.simulator import world as world_module
from fairshare.simulator.policies import PolicyName
from fairshare.simulator.scenario import Scenario, parse
from fairshare.simulator.world import World

ONE_STEP_SECONDS = 0.010 + 20e-6
"""Of an engine that decodes one token."""


def world(text: str, policy: PolicyName = PolicyName.HOLD_RECALL, **options: object) -> World:
    return World(parse(text), policy, **options)  # pyright: ignore[reportArgumentType]


LONE = """
title: one request
duration: 10s
round_trip: 2ms
pools: [{capacity: 4, engines: {max_num_seqs: 4}}]
teams:
  - name: a
    share: 1
    loads: [{burst: 1, start: 1s, prompt: 100, output: 11}]
"""


def test_a_lone_request_takes_the_time_that_is_worked_out_by_hand() -> None:
    outcome = world(LONE).run()
    team = outcome.pools[0].teams["a"]
    # Half a round trip, the step that computes 100 tokens, and half a round trip.
    assert team.first_token_seconds[0] == pytest.approx(0.001 + 0.010 + 100 * 20e-6 + 0.001, abs=1e-9)
    assert (team.finished, team.output_tokens, team.prompt_tokens) == (1, 11, 100)
    assert outcome.pools[0].steps == 11
    assert sum(row[0] for row in outcome.pools[0].windows.slot_seconds) == pytest.approx(
        0.012 + 10 * ONE_STEP_SECONDS, abs=1e-9
    )


def test_a_freed_seat_is_refilled_one_step_later_because_of_the_round_trip() -> None:
    two = LONE.replace("burst: 1,", "burst: 2,").replace("capacity: 4", "capacity: 1").replace("seqs: 4", "seqs: 1")
    seconds = {
        round_trip: world(two.replace("2ms", round_trip)).run().pools[0].teams["a"].first_token_seconds[1]
        for round_trip in ("0s", "2ms")
    }
    # With the engine empty nothing is under way: only the round trips themselves are added.
    assert seconds["2ms"] - seconds["0s"] == pytest.approx(2 * 0.002, abs=1e-9)
    busy = two.replace("capacity: 1", "capacity: 2").replace("seqs: 1", "seqs: 2").replace("burst: 2", "burst: 3")
    busy = busy.replace("output: 11", "output: 11-30")
    first, second = (world(busy.replace("2ms", one)).run().pools[0] for one in ("0s", "2ms"))
    waited = [pool.teams["a"].longest_wait_seconds for pool in (first, second)]
    # The other sequence's next step has begun when the new request arrives.
    assert waited[1] - waited[0] == pytest.approx(ONE_STEP_SECONDS + 0.001, abs=1e-4)


CROWD = """
title: crowd
duration: 20s
pools:
  - {name: one, capacity: 8, engines: {count: 2, max_num_seqs: 4, kv_tokens: 1024, max_model_len: 512}}
teams:
  - {name: a, share: 1/2, loads: [{clients: 9, prompt: 10-200, output: 1-120}]}
  - {name: b, share: 1/4, loads: [{rate: 2/s, n: 3, class: batch, prompt: 10-50, output: 1-60},
      {burst: 9, every: 5s, start: 2s, stream: false, prompt: 9, output: 9-200}]}
  - {name: c, share: 1/8, loads: [{clients: 4, on: 1s, off: 2s, think: 200ms, prompt: 10-200, output: 1-120}]}
  - {name: stranger, loads: [{clients: 2, start: 5s, stop: 9s, prompt: 10, output: 20}]}
changes:
  - {at: 6s, lose_engine: 1, lasting: 5s}
  - {at: 12s, capacity: 6}
  - {at: 15s, phantoms: {a: 3}, usage: {b: 5000}, lasting: 2s}
"""


def columns(scenario: Scenario, policy: PolicyName, seed: int = 1) -> bytes:
    """Everything that a run leaves behind."""
    outcome = World(scenario, policy, seed=seed).run()
    return repr(
        [
            ([*vars_of(team)], pool.windows.output_tokens, pool.windows.slot_seconds, pool.windows.waiting_seconds)
            for pool in outcome.pools
            for team in pool.teams.values()
        ]
    ).encode()


def vars_of(record: object) -> list[object]:
    return [getattr(record, name) for name in record.__slots__]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("policy", PolicyName)
def test_the_same_seed_gives_the_same_run_and_another_seed_another(policy: PolicyName) -> None:
    scenario = parse(CROWD)
    assert columns(scenario, policy) == columns(scenario, policy)
    assert columns(scenario, policy) != columns(scenario, policy, seed=2)


@pytest.mark.parametrize("policy", PolicyName)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_nothing_is_lost_and_nothing_is_counted_twice(policy: PolicyName, seed: int) -> None:
    scenario = parse(CROWD)
    it = World(scenario, policy, seed=seed)
    outcome = it.run()
    pool = outcome.pools[0]
    unfinished = [call for call in it._calls.values()]  # noqa: C416
    for name, team in pool.teams.items():
        open_calls = [call for call in unfinished if call.account.outcome is team]
        assert team.submitted == team.finished + team.failed + len(open_calls)
        account = it._domains[0].accounts[name]
        sequences = sum(len(call.outputs) for call in open_calls)
        ended = sum(
            len(call.outputs) - call.unfinished for call in open_calls if call.sequences and call.engine is not None
        )
        # A request that was refused and has not come again waits for nobody.
        refused = sum(len(call.outputs) for call in open_calls if call.engine is None and not it_is_held(it, call))
        assert account.running + account.waiting == sequences - ended - refused
        assert account.running >= 0
    for row, length in zip(pool.windows.slot_seconds, pool.windows.lengths, strict=True):
        # What two engines of 4 seats can run; a step that has begun counts to its end.
        assert sum(row) <= 8 * (length + 0.03)
    for row, length in zip(pool.windows.waiting_seconds, pool.windows.lengths, strict=True):
        assert all(0.0 <= seconds <= length + 0.02 for seconds in row)


def it_is_held(it: World, call: object) -> bool:
    """Whether the gateway has the call (refused ones are with their clients)."""
    return not any(event[2] == it._offer and event[3] == (call,) for event in it._events)


def test_policies_are_compared_on_the_same_requests() -> None:
    scenario = parse(CROWD)

    def asked(policy: PolicyName) -> list[tuple[int, tuple[int, ...]]]:
        it = World(msgspec.structs.replace(scenario, changes=[]), policy)
        seen: list[tuple[int, tuple[int, ...]]] = []
        submit = it._submit

        def submitted(domain, client, request, prompt, outputs, streams):  # type: ignore[no-untyped-def]
            if request.team == "b":
                seen.append((prompt, tuple(outputs)))
            submit(domain, client, request, prompt, outputs, streams)

        it._submit = submitted
        it.run()
        return seen

    assert asked(PolicyName.FCFS) == asked(PolicyName.HOLD_RECALL)


@pytest.mark.parametrize("policy", PolicyName)
def test_where_no_engine_is_left_nothing_is_sent_until_one_is_back(policy: PolicyName) -> None:
    text = LONE.replace("start: 1s, prompt", "start: 1s, every: 1s, prompt")
    outcome = world(text + "changes: [{at: 1500ms, lose_engine: 0, lasting: 2s}]\n", policy).run()
    team = outcome.pools[0].teams["a"]
    ran = [row[0] > 0.0 for row in outcome.pools[0].windows.output_tokens]
    assert ran[:3] == [False, True, False]
    assert all(ran[4:])  # back at 3.5 s; clients that were refused come again at 4 s
    assert (team.submitted, team.finished) == (10, 9)  # the last one comes as the run ends


def test_several_engines_are_never_ahead_of_what_they_are_sent() -> None:
    # `_catch_up` asserts it at every message; four engines with every kind of event give it the chance to fail.
    text = CROWD.replace("count: 2", "count: 4").replace("capacity: 8", "capacity: 16")
    assert world(text).run().requests > 100


def test_without_the_others_a_team_sends_what_it_sends_with_them() -> None:
    together, alone = world(CROWD).run(), world(CROWD, only_team="b").run()
    assert alone.pools[0].teams["a"].submitted == 0
    assert alone.pools[0].teams["b"].submitted == together.pools[0].teams["b"].submitted


def test_a_lone_team_reaches_the_whole_pool() -> None:
    outcome = world(CROWD.split("changes:", maxsplit=1)[0], only_team="a").run()
    running = [row[0] for row in outcome.pools[0].windows.running]
    assert max(running) == 8


FALLBACK = """
title: fallback
duration: 20s
pools:
  - {name: full, capacity: 2, fallback: idle, engines: {max_num_seqs: 2}}
  - {name: idle, capacity: 4, engines: {max_num_seqs: 4}}
teams:
  - {name: a, share: 1/2, loads: [{clients: 12, pool: full, prompt: 10, output: 100}]}
  - {name: b, share: 1/2}
"""


def test_borrowers_use_the_free_room_of_the_fallback_pool() -> None:
    outcome = world(FALLBACK).run()
    ran = outcome.pools[0].teams["a"].output_tokens
    assert ran == pytest.approx(6 * 20 / ONE_STEP_SECONDS, rel=0.05)


def test_the_simulator_scrapes_as_often_as_the_gateway() -> None:
    assert world_module.SCRAPE_SECONDS == SCRAPE_EVERY * CHECK_SECONDS
