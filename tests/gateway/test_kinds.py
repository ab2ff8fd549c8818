"""Our priorities in SGLang's numbers."""

import pytest

from fairshare.core.priority import MAX_RANK, ServiceClass, borrow_priority, within_share_priority
from fairshare.gateway.kinds import WANTED_THRESHOLD, SglangFlags, sglang_priority

OWNERS = [within_share_priority(one) for one in ServiceClass]
BORROWERS = [borrow_priority(rank, one) for rank in range(MAX_RANK + 1) for one in ServiceClass]
FLAGS = [
    SglangFlags(low_values_first=low, preemption_threshold=threshold)
    for low in (False, True)
    for threshold in (0, 1, 2, 10, 19, 20, 1000)
]


def preempts(waiting: int, running: int, flags: SglangFlags) -> bool:
    """SGLang's own test (`PrefillAdder.preempt_to_schedule`)."""
    sign = 1 if flags.low_values_first else -1
    return (waiting - running) * -sign > flags.preemption_threshold


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_an_owner_displaces_every_borrower_and_nobody_displaces_anybody_else(flags: SglangFlags) -> None:
    everybody = [*OWNERS, *BORROWERS]
    for waiting in everybody:
        for running in everybody:
            displaces = preempts(sglang_priority(waiting, flags), sglang_priority(running, flags), flags)
            assert displaces == (waiting in OWNERS and running in BORROWERS), (waiting, running)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_the_order_is_kept_and_from_the_wanted_threshold_on_nothing_is_merged(flags: SglangFlags) -> None:
    sign = 1 if flags.low_values_first else -1
    numbers = [sign * sglang_priority(one, flags) for one in [*OWNERS, *BORROWERS]]
    assert numbers == sorted(numbers)
    if flags.preemption_threshold >= WANTED_THRESHOLD:
        assert len(set(numbers)) == len(numbers)


def test_vllms_own_numbers_would_do_neither_at_the_default_threshold() -> None:
    flags = SglangFlags(low_values_first=True)
    assert not preempts(OWNERS[0], BORROWERS[0], flags)
    assert preempts(BORROWERS[0], BORROWERS[-1], flags)
