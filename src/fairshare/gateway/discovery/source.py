"""What every source of instances has in common."""

from collections.abc import Iterable
from typing import Protocol

from fairshare.gateway.options import InstanceSpec

SHORTEST_PAUSE_SECONDS = 1.0
"""After something failed, before it is tried again the first time; doubled each time it fails again."""

LONGEST_PAUSE_SECONDS = 30.0


class Told(Protocol):
    """Hears what a source has to say."""

    def answered(self, instances: Iterable[InstanceSpec]) -> None:
        """Every instance that the source names now."""
        ...

    def failed(self, trouble: str) -> None:
        """The source cannot be followed; `trouble` says why, as a part of a sentence."""
        ...


class Source(Protocol):
    """Somewhere that names instances."""

    @property
    def missing_seconds(self) -> float:
        """How long an instance stays that an answer does not name (see `SourceState`)."""
        ...

    async def follow(self, told: Told) -> None:
        """Tell every answer and every failure; goes on until it is cancelled."""
        ...


def pause_seconds(failures: int) -> float:
    """How long to wait after so many failures in a row (at least one)."""
    return min(LONGEST_PAUSE_SECONDS, SHORTEST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 10))
