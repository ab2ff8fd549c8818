"""A few seconds of `make fuzz`, always the same cases."""

import pytest

from fuzz.targets import TARGETS, play

CASES = {"relay": 25}


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_that_is_sent_at_random_breaks_it(target: str) -> None:
    for seed in range(CASES.get(target, 400)):
        play(target, seed)
