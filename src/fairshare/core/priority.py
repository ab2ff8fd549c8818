"""The priority layout. Lower runs earlier in vLLM.

Within share: `WITHIN_SHARE_BASE + class`. Borrowing: `BORROW_BASE + RANK_STEP * rank + class`.
The whole range is {0, 1} and {10, 11} ... {100, 101}; a batch request within share still beats every borrower.
"""

from enum import IntEnum, StrEnum

WITHIN_SHARE_BASE = 0
"""Priority of a request inside its team's reservation, plus the class."""

BORROW_BASE = 10
"""Priority of the least over-served borrower, plus the class."""

RANK_STEP = 10
"""Separates borrowers of successive fairshare ranks."""

MAX_RANK = 9
"""Bounds the rank, so that priorities stay small."""


class ServiceClass(IntEnum):
    """The service class of a request."""

    INTERACTIVE = 0
    """Latency sensitive."""

    BATCH = 1
    """Throughput oriented; yields to interactive work of the same standing."""


class Standing(StrEnum):
    """What a grant runs on: what its team owns, or what others leave idle."""

    WITHIN_SHARE = "within-share"
    BORROWING = "borrowing"


def within_share_priority(service_class: ServiceClass) -> int:
    """Priority of a request within its team's share: 0 or 1."""
    return WITHIN_SHARE_BASE + service_class


def borrow_priority(rank: int, service_class: ServiceClass) -> int:
    """Priority of a borrower whose team has `rank` (0 to `MAX_RANK`) teams ahead: 10 to 101."""
    return BORROW_BASE + RANK_STEP * rank + service_class
