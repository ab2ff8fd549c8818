"""Which instance: what is remembered, how it is bounded, and that the data path goes by it."""

import heapq
from itertools import count

import pytest

from fairshare import Pool
from fairshare.core.decisions import Decision, HoldOptions, Instance, Mode, Request, Send
from fairshare.core.dispatch import make_queue
from fairshare.gateway.affinity import PrefixMemory, ResponseMemory
from fairshare.gateway.options import Balance
from gateway.hostile_engine import answer, forever, sends
from gateway.rig import Rig, request_bytes, run

ALL = {"e0", "e1", "e2"}


def test_the_instance_that_got_the_longest_prefix_is_named_first() -> None:
    memory = PrefixMemory()
    memory.sent([1, 2, 3], "e0")
    memory.sent([1, 2, 4, 5], "e1")
    assert memory.preferred([1, 2, 3, 9], ALL) == ["e0", "e1"]
    assert memory.preferred([1, 2, 4, 5, 6], ALL) == ["e1"]
    assert memory.preferred([7, 8, 9], ALL) == []
    assert memory.preferred([], ALL) == []


def test_the_instance_that_got_a_prefix_last_is_the_one() -> None:
    memory = PrefixMemory()
    memory.sent([1], "e0")
    memory.sent([1], "e1")
    assert memory.preferred([1], ALL) == ["e1"]


def test_a_beginning_that_is_a_small_part_of_the_prompt_decides_nothing() -> None:
    memory = PrefixMemory()
    memory.sent([1], "e0")
    assert memory.preferred([1, 2, 3, 4], ALL) == ["e0"]  # 1 of 4 KiB
    assert memory.preferred([1, 2, 3, 4, 5], ALL) == []  # 1 of 5 KiB


def test_an_instance_that_accepts_nothing_is_not_named() -> None:
    memory = PrefixMemory()
    memory.sent([1, 2], "e0")
    memory.sent([1], "e1")
    assert memory.preferred([1, 2], {"e1", "e2"}) == ["e1"]


def test_what_was_used_last_is_remembered_and_the_oldest_forgotten() -> None:
    memory = PrefixMemory(limit=3)
    memory.sent([1, 2], "e0")
    memory.sent([3], "e1")
    memory.sent([1], "e0")
    memory.sent([4], "e1")
    assert len(memory) == 3
    assert [memory.preferred([key], ALL) for key in (1, 2, 3, 4)] == [["e0"], [], ["e1"], ["e1"]]


def test_stored_responses_are_remembered_from_the_beginning_of_an_answer_and_bounded() -> None:
    memory = ResponseMemory(limit=2)
    memory.answered(b'{"id":"resp_a","object":"response"}', "e0")
    memory.answered(b'event: response.created\ndata: {"type": "x", "response": {"id": "resp_b"}}\n\n', "e1")
    memory.answered(b'{"id":"msg_1"}' + b" " * 5000 + b'{"id":"resp_far"}', "e1")
    assert [memory.instance_of(name) for name in ("resp_a", "resp_b", "resp_far")] == ["e0", "e1", None]
    memory.answered(b'{"id":"resp_c"}', "e1")
    assert len(memory) == 2
    assert memory.instance_of("resp_a") is None


# ---------------------------------------------------------------------- on the data path


def long_chat(*contents: str) -> dict[str, object]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text} for text in contents]}


@pytest.mark.parametrize(("balance", "answered_by"), [(Balance.PREFIX, 1), (Balance.LEAST_LOADED, 0)])
def test_a_conversation_stays_with_its_instance_unless_only_load_decides(balance: Balance, answered_by: int) -> None:
    async def main() -> None:
        async with Rig.started(engines=2, mode=Mode.HOLD, capacity=16, balance=balance) as rig:
            first, second = rig.engines
            other = await rig.client()
            first.scripts = [forever]
            await other.send(request_bytes())
            await first.received(1)
            await rig.ask(body=long_chat("red " * 500))  # to the second: the first is busier
            assert (len(first.asked), len(second.asked)) == (1, 1)
            other.leave()
            await rig.kept.wait(2)
            await rig.ask(body=long_chat("red " * 500, "and then?"))
            assert len(rig.engines[answered_by].asked) == 2

    run(main)


def test_a_request_that_another_instance_had_to_take_is_remembered_there() -> None:
    async def main() -> None:
        async with Rig.started(engines=2, mode=Mode.HOLD, capacity=16) as rig:
            first, second = rig.engines
            await first.stop()
            await rig.ask(body=long_chat("red " * 500))  # refused by the first, answered by the second
            await first.start(first.port)
            await rig.ask(body=long_chat("red " * 500, "and then?"))
            assert (len(first.asked), len(second.asked)) == (0, 2)

    run(main)


def test_a_follow_up_goes_to_the_instance_that_holds_the_response() -> None:
    async def main() -> None:
        async with Rig.started(engines=2, mode=Mode.HOLD, capacity=2) as rig:
            first, second = rig.engines
            other = await rig.client()
            first.scripts = [forever]
            await other.send(request_bytes())
            await first.received(1)
            second.script = sends(answer(b'{"id":"resp_1","object":"response","output":[]}'))
            assert (await rig.ask("/v1/responses", {"model": "tiny", "input": "hi"})).json["id"] == "resp_1"
            other.leave()
            await rig.kept.wait(2)
            await rig.ask("/v1/responses", {"model": "tiny", "input": "more", "previous_response_id": "resp_1"})
            assert [asked.path for asked in second.asked] == ["/v1/responses"] * 2

    run(main)


# ---------------------------------------------------------------------- unequal speed


def throughput(prefer: dict[str, tuple[str, ...]]) -> dict[str, float]:
    """Two teams flood two instances of which one is four times as fast; each team's part of what was finished."""
    now = [0.0]
    pool = Pool("chat", 16, {"a": "1/2", "b": "1/2"}, 0.0, clock=lambda: now[0])
    instances = [Instance(id="fast", part_slots=8, seats=16), Instance(id="slow", part_slots=8, seats=16)]
    queue = make_queue(pool, Mode.HOLD, options=HoldOptions(longest_wait_seconds=1e9), instances=instances)
    seconds = {"fast": 1.0, "slow": 4.0}
    ids, ends, done = count(), list[tuple[float, str]](), {"a": 0, "b": 0}

    def submit(team: str) -> None:
        request = Request(id=f"{team}{next(ids)}", team=team, preferred_instances=prefer.get(team, ()))
        carry_out(queue.submitted(request))

    def carry_out(decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Send):
                heapq.heappush(ends, (now[0] + seconds[decision.instance_id], decision.request_id))

    for _ in range(40):
        submit("a")
        submit("b")
    while now[0] < 400.0:
        now[0], request_id = heapq.heappop(ends)
        team = request_id[0]
        done[team] += 1
        carry_out(queue.released(request_id, 1.0))
        submit(team)
    return {team: number / sum(done.values()) for team, number in done.items()}


def test_without_prefixes_both_teams_get_half_of_the_fast_instance() -> None:
    assert throughput({})["b"] == pytest.approx(0.5, abs=0.01)


def test_a_team_whose_prefixes_all_are_on_the_fast_instance_gets_at_most_a_quarter_of_it_more() -> None:
    # 5 of 8 fast slots and 3 of 8 slow ones: (5 x 4 + 3) / 40 of what is finished.
    assert 0.5 < throughput({"a": ("fast",)})["a"] <= 23 / 40 + 0.01


def test_teams_whose_prefixes_all_are_on_the_fast_instance_share_it() -> None:
    assert throughput({"a": ("fast",), "b": ("fast",)})["a"] == pytest.approx(0.5, abs=0.01)
