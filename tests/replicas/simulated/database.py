"""A model of the store: leases, and what owners save; with a clock of its own, slowness, refusals and outages."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from fairshare.replicas.lease import CallKind, Lease
from fairshare.replicas.member import LeaseCall, LeftBehind, LoadCall, SaveCall, StoreCall
from replicas.simulated.timeline import Timeline

PATIENCE_SECONDS = 2.0
"""After it a caller gives up, as `fairshare.storage.leases` does; what it asked for may still be done."""

Answer = Lease | LeftBehind | bool | None


@dataclass
class Row:
    """One lease, and what goes with it."""

    epoch: int = 0
    owner: str = ""
    address: str = ""
    ends_at: float = float("-inf")
    used: dict[str, dict[str, float]] | None = None
    state: bytes = b""
    as_of: float = 0.0


class Database:
    """Does every call between its sending and its answer, in a transaction; one after the other."""

    def __init__(self, timeline: Timeline, rng: random.Random, *, fenced: bool = True) -> None:
        self._timeline = timeline
        self._rng = rng
        self._offset_seconds = rng.uniform(-1e6, 1e6)
        self._fenced = fenced
        self.row = Row()
        self.latest_seconds = 0.02
        """How long a call takes at most."""
        self._locked_until = 0.0
        self.old_writes = 0
        """Writes of an old epoch that came; none is accepted."""
        self.is_up = True
        self.refuses = 0.0
        """The part of the calls that fail."""

    def clock(self) -> float:
        return self._timeline.now + self._offset_seconds

    def call(self, call: StoreCall, answered: Callable[[Answer], None], is_paused: Callable[[], bool]) -> None:
        """`answered` is called once, with None if nothing came in time.

        `is_paused`: whoever asks is stopped. Its transaction stands still, and goes on where it was.
        """
        rng, timeline = self._rng, self._timeline
        is_open = True

        def answer(value: Answer) -> None:
            nonlocal is_open
            if is_open:
                is_open = False
                answered(value)

        timeline.after(PATIENCE_SECONDS, lambda: answer(None))
        gives_up_at = timeline.now + PATIENCE_SECONDS
        back_seconds = rng.uniform(0.0, self.latest_seconds)

        def arrives() -> None:
            nonlocal gives_up_at
            if is_paused():
                gives_up_at = float("inf")
                timeline.after(0.1, arrives)
                return
            # The lease's row is locked by the first statement of every transaction: they follow each other.
            if timeline.now < self._locked_until:
                timeline.at(self._locked_until, arrives)
                return
            if not self.is_up or timeline.now > gives_up_at:
                return  # whoever asked has given up and will not commit
            if rng.random() < self.refuses:
                timeline.after(back_seconds, lambda: answer(None))
                return
            read_at = self.clock()
            self._locked_until = timeline.now + rng.uniform(0.0, self.latest_seconds)
            timeline.at(self._locked_until, lambda: commits(read_at))

        def commits(read_at: float) -> None:
            # Also if whoever asked has given up meanwhile: its commit was on the way.
            value = self._do(call, read_at)
            timeline.after(back_seconds, lambda: answer(value if self.is_up else None))

        timeline.after(rng.uniform(0.0, self.latest_seconds), arrives)

    def _do(self, call: StoreCall, now: float) -> Answer:
        """`now`: when the transaction read the clock."""
        row = self.row
        match call:
            case SaveCall():
                if call.epoch != row.epoch:
                    self.old_writes += 1
                    assert self._fenced, f"a write of epoch {call.epoch} was accepted in epoch {row.epoch}"
                    return False
                row.used = {pool: dict(by_team) for pool, by_team in call.used.items()}
                row.state, row.as_of = call.state, now
                return True
            case LoadCall():
                if call.epoch != row.epoch:
                    return False
                return LeftBehind(
                    usage={
                        pool: {team: (cost, now - row.as_of) for team, cost in by_team.items()}
                        for pool, by_team in (row.used or {}).items()
                    },
                    state=row.state,
                )
            case LeaseCall():
                match call.call.kind:
                    case CallKind.ACQUIRE:
                        if row.ends_at <= now or row.owner == call.owner:
                            row.epoch += 1
                            row.owner, row.address = call.owner, call.address
                            row.ends_at = now + call.seconds
                    case CallKind.RENEW:
                        if row.epoch == call.call.epoch and row.ends_at > now:
                            row.ends_at = now + call.seconds
                    case CallKind.RELEASE:
                        if row.epoch == call.call.epoch and row.ends_at > now:
                            row.ends_at = now
                    case CallKind.LOOK:
                        pass
                return Lease(row.epoch, row.owner, row.address, row.ends_at - now)
