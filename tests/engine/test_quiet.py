"""`Scheduler.quiet_until`: what a simulator of several engines relies on."""

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from fairshare.engine.scheduler import Change, Scheduler, SchedulerConfig

REQUESTS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 90), st.integers(0, 60), st.sampled_from((0, 10, 20))),
    min_size=1,
    max_size=25,
)
"""(step before which it comes, prompt, output, priority)."""


@settings(max_examples=50, deadline=None)
@given(requests=REQUESTS, seats=st.integers(1, 6), blocks=st.integers(10, 40), budget=st.sampled_from((8, 64, 512)))
def test_nothing_happens_in_steps_that_begin_before(
    requests: list[tuple[int, int, int, int]], seats: int, blocks: int, budget: int
) -> None:
    changes: list[tuple[Change, str]] = []
    config = SchedulerConfig(
        max_num_seqs=seats, num_blocks=blocks + 1, max_num_batched_tokens=budget, max_model_len=160
    )
    scheduler = Scheduler(config, lambda change, request_id: changes.append((change, request_id)))
    coming = sorted(enumerate(requests), key=lambda numbered: numbered[1][0])
    begun: set[str] = set()
    quiet_until = scheduler.quiet_until()
    assert quiet_until == inf
    for step in range(400):
        while coming and coming[0][1][0] <= step:
            number, (_, prompt, output, priority) = coming.pop(0)
            scheduler.add(str(number), prompt_tokens=prompt, output_tokens=output, priority=priority)
            quiet_until = scheduler.quiet_until()
        begins_at, seen = scheduler.now, len(changes)
        events = scheduler.step()
        matters = [event for event in events if event.finished or event.request_id not in begun]
        begun.update(event.request_id for event in events)
        if begins_at < quiet_until and quiet_until != inf:
            assert not matters
            assert len(changes) == seen
        # Asked again or not, what was said stays true.
        if step % 3 == 0:
            quiet_until = scheduler.quiet_until()
            assert quiet_until >= scheduler.now
    assert not scheduler.busy or coming


def test_a_decoding_request_is_quiet_until_its_last_step() -> None:
    scheduler = Scheduler(SchedulerConfig(step_seconds=1.0, token_seconds=0.0))
    scheduler.add("a", prompt_tokens=10, output_tokens=20)
    assert scheduler.quiet_until() == 0.0
    scheduler.step()
    # It has one token of twenty: eighteen quiet steps, and the one that begins at 19 ends it.
    assert 18.0 < scheduler.quiet_until() < 19.0
