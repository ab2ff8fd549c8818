"""How engines of each kind are told a priority: our layout in the numbers that keep the promise there.

SGLang 0.5 (read in its source: `schedule_policy.py`, `scheduler.py`) differs from vLLM in three ways:

* A higher number goes first, unless `--schedule-low-priority-values-first`.
* A waiting request *does* displace running ones, when no seat is free and the difference to theirs is above
  `--priority-scheduling-preemption-threshold` (10 by default), and not equal to it. Its work is computed again.
* A request without a priority waits behind all that have one.

So an owner must be further than the threshold from every borrower, and no two borrowers may be: they would evict each
other whenever ranks change. vLLM's numbers do neither (an owner at 0 and the first borrower at 10 are not more than 10
apart, the borrowers at 10 and at 101 are).
"""

from dataclasses import dataclass

from fairshare.core.priority import BORROW_BASE, MAX_RANK, RANK_STEP, ServiceClass

DEFAULT_THRESHOLD = 10
"""SGLang's own."""

BORROWER_LEVELS = (MAX_RANK + 1) * len(ServiceClass)

WANTED_THRESHOLD = BORROWER_LEVELS
"""From here on every rank and class of borrowers has a number of its own; below, neighbours share one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangFlags:
    """How one SGLang server was started, as far as priorities go."""

    low_values_first: bool = False
    preemption_threshold: int = DEFAULT_THRESHOLD


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangReport:
    """What an SGLang server says of its flags at /server_info."""

    flags: SglangFlags
    enabled: bool
    """`--enable-priority-scheduling`."""
    displaces: bool
    """False: `--disable-priority-preemption`."""
    retraction_policy: str
    """Who gives way when memory is short: `length` or `priority`."""


def sglang_priority(priority: int, flags: SglangFlags) -> int:
    """The number for SGLang. `priority`: of our layout (0, 1, 10, 11 ... 100, 101)."""
    threshold = max(0, flags.preemption_threshold)
    if priority < BORROW_BASE:
        urgency = min(priority, threshold)
    else:
        rank, service_class = divmod(priority - BORROW_BASE, RANK_STEP)
        level = rank * len(ServiceClass) + service_class
        # More than the threshold behind the least urgent owner; all borrowers within the threshold of each other.
        level = level * min(threshold, BORROWER_LEVELS - 1) // (BORROWER_LEVELS - 1)
        urgency = min(len(ServiceClass) - 1, threshold) + threshold + 1 + level
    return urgency if flags.low_values_first else -urgency
