"""Who decides for a group of pools: the lease, as one replica sees it. Pure: calls to the store are asked for and told.

A lease ends on the database's clock, `lease_seconds` after the store carried the call out, which is after the call was
sent. So a replica that stops `lease_seconds` after it sent the call, on its own clock, less what its clock may run slow
and a margin, has stopped before anybody else can take the lease.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOptions:
    """How long leases last, in seconds."""

    lease_seconds: float = 5.0
    renew_every_seconds: float = 1.0
    """Also between two tries when the store fails."""
    poll_seconds: float = 0.5
    """How often a replica that does not own looks whether the lease is free."""
    calm_poll_seconds: float = 2.0
    """The same while the owner answers it: a link that is lost, or an owner that resigns, tells sooner."""
    reluctant_seconds: float = 1.0
    """A replica that is going takes a lease that nobody else wanted for so long: somebody must count what ends."""
    margin_seconds: float = 0.5
    """Between the last decision of an owner and the earliest time that its lease can be taken."""
    clock_drift: float = 0.01
    """By what part a replica's clock may be slower than the database's."""

    def __post_init__(self) -> None:
        if self.trusted_seconds <= 2 * self.renew_every_seconds:
            raise ValueError(
                f"a lease of {self.lease_seconds:g} s is too short: an owner may decide for {self.trusted_seconds:g} s"
                f" of it, which must be more than two renewals ({2 * self.renew_every_seconds:g} s)"
            )

    @property
    def trusted_seconds(self) -> float:
        """How long after it sent a call that succeeded an owner may decide."""
        return self.lease_seconds * (1.0 - self.clock_drift) - self.margin_seconds


class Role(Enum):
    """What a replica is to a group of pools."""

    FOLLOWER = "follower"
    OWNER = "owner"
    RESIGNED = "resigned"
    """It gave the lease back, for good."""


class CallKind(Enum):
    """What the store is asked to do."""

    ACQUIRE = "acquire"
    """Take the lease if it is free, with a new epoch; the answer is the lease in force, whoever has it."""
    RENEW = "renew"
    RELEASE = "release"
    LOOK = "look"
    """Read the lease in force; one that is going does not take it."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call to the store. The next one is not made before this one is answered."""

    kind: CallKind
    epoch: int
    """Of the lease to renew or release; else 0."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease that is in force, as the store answered."""

    epoch: int
    owner: str
    address: str
    left_seconds: float


@dataclass(frozen=True, slots=True)
class Won:
    """This replica owns from now on."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Lost:
    """It must decide nothing more."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Follows:
    """Another replica owns; it is reached there."""

    epoch: int
    owner: str
    address: str


LeaseEvent = Won | Lost | Follows


def groups(fallbacks: Mapping[str, str | None]) -> dict[str, tuple[str, ...]]:
    """Pools that share capacity have one owner: the groups of pools that `fallback` joins.

    Args:
        fallbacks: pool → the pool that it falls back on, or None.

    Returns:
        The name of each group, which is its first pool's, to its pools; both in order of name.
    """
    of: dict[str, set[str]] = {pool: {pool} for pool in fallbacks}
    for pool, fallback in fallbacks.items():
        if fallback is not None:
            joined = of[pool] | of[fallback]
            for member in joined:
                of[member] = joined
    return {pool: tuple(sorted(of[pool])) for pool in sorted(of) if pool == min(of[pool])}


class Keeper:
    """One replica's part in who owns a group of pools.

    The shell asks `next_call` when `next_due` comes, carries the call out, and reports `answered`.
    """

    def __init__(self, options: LeaseOptions, *, replica: str) -> None:
        self._options = options
        self._replica = replica
        self.role = Role.FOLLOWER
        self.epoch = 0
        """The highest seen; one's own while one owns."""
        self.owner = ""
        self.owner_address = ""
        self._decides_until = float("-inf")
        self._next_call_at = float("-inf")
        self._called = False
        self._to_release = 0
        """The epoch of a lease to give back; 0: none."""
        self._free_since: float | None = None
        """While it is going: since when the lease has been seen free."""

    @property
    def has_released(self) -> bool:
        """It resigned, and the store knows."""
        return self.role is Role.RESIGNED and not self._to_release

    @property
    def decides_until(self) -> float:
        """When an owner's right to decide ends, unless it is renewed before."""
        return self._decides_until

    def decides(self, now: float) -> bool:
        """Whether this replica may decide now. To be asked before every decision."""
        return self.role is Role.OWNER and now < self._decides_until

    def next_due(self) -> float:
        """When `tick` or `next_call` has something to do; infinity: not before something else happens."""
        due = float("inf") if self._called else self._next_call_at
        return min(due, self._decides_until) if self.role is Role.OWNER else due

    def next_call(self, now: float) -> Call | None:
        """What to ask the store now; None: nothing. Report the answer with the time of this call as `sent_at`."""
        if self._called or now < self._next_call_at:
            return None
        self._called = True
        if self._to_release:
            return Call(CallKind.RELEASE, self._to_release)
        match self.role:
            case Role.OWNER:
                return Call(CallKind.RENEW, self.epoch)
            case Role.FOLLOWER:
                return Call(CallKind.ACQUIRE, 0)
            case Role.RESIGNED:
                return Call(CallKind.LOOK, 0)

    def answered(self, call: Call, sent_at: float, lease: Lease | None, now: float) -> list[LeaseEvent]:
        """The store answered a call; `lease` None: it failed, and nobody knows whether the call was carried out."""
        self._called = False
        options = self._options
        events = self.tick(now)
        if call.kind is CallKind.RELEASE:
            if lease is not None:
                self._to_release = 0
            self._next_call_at = now + (options.renew_every_seconds if lease is None else options.poll_seconds / 5)
            return events
        if lease is None:
            self._next_call_at = now + (
                options.renew_every_seconds if self.role is Role.OWNER else options.poll_seconds
            )
            return events
        if lease.epoch < self.epoch:  # an answer about the past
            self._next_call_at = now
            return events
        mine = lease.owner == self._replica and lease.left_seconds > 0
        if mine and self.role is Role.RESIGNED:  # it was taken while this replica was going
            self._to_release, self._next_call_at = lease.epoch, now
            return events
        if self.role is Role.RESIGNED:
            self._see_whether_free(lease, now)
        if mine and call.kind is CallKind.ACQUIRE:
            self._own(lease.epoch, sent_at, events)
        elif mine and self.role is Role.OWNER and lease.epoch == self.epoch:
            self._decides_until = sent_at + options.trusted_seconds
        elif self.role is Role.OWNER:
            events.append(self._lose(f"epoch {lease.epoch} of the lease is in force, held by {lease.owner!r}"))
        if self.role is Role.OWNER:
            events += self.tick(now)
        if self.role is Role.OWNER:
            self._next_call_at = sent_at + options.renew_every_seconds
        else:
            self._follow(lease, now, events)
        return events

    def tick(self, now: float) -> list[LeaseEvent]:
        """Time passed: an owner that could not renew in time has lost its right."""
        if self.role is Role.OWNER and now >= self._decides_until:
            return [self._lose("it could not be renewed in time")]
        return []

    def look_again(self, now: float) -> None:
        """The owner seems to be gone or said so: ask the store at once."""
        if self.role is not Role.OWNER:
            self._next_call_at = min(self._next_call_at, now)

    def calm(self, lease: Lease, now: float) -> None:
        """The owner of the lease that was just read answers on its link: the store need not be asked so often."""
        wait = min(self._options.calm_poll_seconds, lease.left_seconds)
        self._next_call_at = max(self._next_call_at, now + wait)

    def resign(self, now: float) -> list[LeaseEvent]:
        """Give the lease back, and take it again only if nobody else does: this replica is going."""
        events: list[LeaseEvent] = []
        if self.role is Role.OWNER:
            self._to_release = self.epoch
            events.append(self._lose("this replica is going"))
        self.role = Role.RESIGNED
        self._free_since = None
        self._next_call_at = now
        return events

    def _see_whether_free(self, lease: Lease, now: float) -> None:
        if lease.left_seconds > 0:
            self._free_since = None
        elif self._free_since is None:
            self._free_since = now
        elif now - self._free_since >= self._options.reluctant_seconds:
            self.role = Role.FOLLOWER

    def _own(self, epoch: int, sent_at: float, events: list[LeaseEvent]) -> None:
        self.role, self.epoch = Role.OWNER, epoch
        self.owner, self.owner_address = self._replica, ""
        self._decides_until = sent_at + self._options.trusted_seconds
        events.append(Won(epoch))

    def _lose(self, reason: str) -> Lost:
        self.role = Role.FOLLOWER
        self._decides_until = float("-inf")
        return Lost(self.epoch, reason)

    def _follow(self, lease: Lease, now: float, events: list[LeaseEvent]) -> None:
        options = self._options
        is_held = lease.left_seconds > 0 and lease.owner != self._replica
        if is_held and (lease.epoch != self.epoch or lease.owner != self.owner):
            events.append(Follows(lease.epoch, lease.owner, lease.address))
        self.epoch, self.owner, self.owner_address = lease.epoch, lease.owner, lease.address
        # Whoever asks first after the end gets it: ask then, or in turn.
        wait = min(options.poll_seconds, lease.left_seconds) if is_held else 0.0
        self._next_call_at = now + max(wait, options.poll_seconds / 10)
