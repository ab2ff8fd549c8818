"""Which instances belong to a pool now: pure rules over what its configuration, its sources and operators say.

Nothing here asks anybody or reads a clock: what sources answered comes in, members come out (`step`).
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum

from fairshare.gateway.findings import Finding, Severity
from fairshare.gateway.instances import FORGIVEN_SECONDS, LONGEST_OUT_SECONDS, OUT_SECONDS
from fairshare.gateway.options import InstanceSpec

HELD_SECONDS = 300.0
"""How long instances that nothing names any more stay, while none of those still named accepts requests.

A source that answers wrongly with nothing, or with other instances only, must not empty a pool. Not for ever: one day
an address belongs to something else.
"""

FORGOTTEN_SECONDS = 600.0
"""How long it is remembered of an instance that it left."""


@dataclass(slots=True, kw_only=True)
class SourceState:
    """What one source said."""

    name: str
    """In words, as a part of a sentence."""
    missing_seconds: float = 0.0
    """How long an instance stays that an answer does not name; above 0 where one answer may not hold all."""
    named: dict[str, InstanceSpec] = field(default_factory=dict[str, InstanceSpec])
    """By the last good answer, and those that have not been missing for long."""
    missing_since: dict[str, float] = field(default_factory=dict[str, float])
    answered: bool = False
    trouble: str = ""
    """Why its last answer could not be used, as a part of a sentence; empty: it could."""

    def answer(self, instances: Iterable[InstanceSpec], now: float) -> None:
        """A good answer: every instance that it names now."""
        now_named = {instance.id: instance for instance in instances}
        gone = {instance_id: spec for instance_id, spec in self.named.items() if instance_id not in now_named}
        self.missing_since = {instance_id: self.missing_since.get(instance_id, now) for instance_id in gone}
        self.named = now_named | gone
        self.answered = True
        self.trouble = ""
        self.expire(now)

    def expire(self, now: float) -> None:
        """Drop what has been missing for long enough; while the source fails, nothing is known to be missing."""
        if self.trouble:
            return
        for instance_id, since in list(self.missing_since.items()):
            if now - since >= self.missing_seconds:
                del self.missing_since[instance_id], self.named[instance_id]


@dataclass(slots=True)
class _Left:
    """An instance that left, in case it comes back."""

    at: float
    times: int

    @property
    def returns_at(self) -> float:
        return self.at + min(LONGEST_OUT_SECONDS, OUT_SECONDS * 2.0 ** (self.times - 1))


@dataclass(slots=True)
class _Member:
    spec: InstanceSpec
    since: float
    times_left: int
    """How often it left lately, before it came back this time."""
    from_source: bool = True
    """Only a source named it, when it was named last."""


class State(StrEnum):
    """What an instance that somebody names is to its pool."""

    MEMBER = "member"
    """It belongs to it, and gets requests if it is healthy."""

    DRAINED = "drained"
    """Operators took it out."""

    WAITING = "waiting"
    """It left lately and must wait a little before it belongs again."""

    KEPT = "kept"
    """Nothing names it any more; it stays while no other instance gets requests."""


@dataclass(frozen=True, slots=True)
class Named:
    """One instance, and who names it."""

    id: str
    state: State
    named_by: tuple[str, ...]
    """In words: the configuration, the sources, operators."""


class Fleet:
    """The instances of one pool. `now` is on one monotone clock.

    What people say counts at once: what the configuration names and what operators add belongs until they take it back,
    and whom operators drained is out. What a source names belongs until the source no longer names it; one that comes
    back soon after it left waits, for longer each time (as an engine that fails its health check does). While nothing
    that is still named accepts requests, nothing that a source named leaves (`HELD_SECONDS`), and what comes back need
    not wait.
    """

    def __init__(self, pool: str, configured: Sequence[InstanceSpec], sources: Sequence[SourceState]) -> None:
        self._pool = pool
        self._configured = {instance.id: instance for instance in configured}
        self._sources = list(sources)
        self._added: dict[str, InstanceSpec] = {}
        self._drained: set[str] = set()
        self._members: dict[str, _Member] = {}
        self._left: dict[str, _Left] = {}
        self._held_since: float | None = None

    # ------------------------------------------------------------------ what others say

    def reconfigure(self, configured: Sequence[InstanceSpec], sources: Sequence[SourceState]) -> None:
        """A reload: other instances in the configuration, other sources. What operators did stays."""
        self._configured = {instance.id: instance for instance in configured}
        self._sources = list(sources)

    def add(self, spec: InstanceSpec) -> bool:
        """An operator adds an instance, or takes a drained one back. Returns whether that changes anything."""
        was_drained = spec.id in self._drained
        self._drained.discard(spec.id)
        self._left.pop(spec.id, None)
        if spec.id in self._named():
            return was_drained
        self._added[spec.id] = spec
        return True

    def drain(self, instance_id: str) -> bool:
        """An operator takes a member out until it is added again. Returns whether that changes anything."""
        if instance_id in self._drained:
            return False
        self._drained.add(instance_id)
        return True

    def remove(self, instance_id: str) -> bool:
        """An operator takes back what `add` and `drain` did. Returns whether that changes anything."""
        changes = instance_id in self._added or instance_id in self._drained
        self._added.pop(instance_id, None)
        self._drained.discard(instance_id)
        return changes

    # ------------------------------------------------------------------ what follows

    def step(self, now: float, accepting: Set[str]) -> tuple[InstanceSpec, ...]:
        """The members now, in the order of the configuration. `accepting`: which of them get requests."""
        for source in self._sources:
            source.expire(now)
        named = self._named()
        for instance_id in [known for known in self._members if known in self._drained]:
            del self._members[instance_id]
        self._let_go(named, now, accepting)
        self._take_in(named, now, accepting)
        self._left = {known: left for known, left in self._left.items() if now - left.at < FORGOTTEN_SECONDS}
        order = {instance_id: place for place, instance_id in enumerate(named)}
        self._members = dict(sorted(self._members.items(), key=lambda item: order.get(item[0], len(order))))
        return tuple(member.spec for member in self._members.values())

    def _named(self) -> dict[str, InstanceSpec]:
        """Everything that should be a member, in order; the configuration's word counts before a source's."""
        named = dict(self._configured)
        for source in self._sources:
            for instance_id in sorted(source.named):
                named.setdefault(instance_id, source.named[instance_id])
        for instance_id, spec in self._added.items():
            named.setdefault(instance_id, spec)
        return {instance_id: spec for instance_id, spec in named.items() if instance_id not in self._drained}

    def _let_go(self, named: Mapping[str, InstanceSpec], now: float, accepting: Set[str]) -> None:
        leaving = [instance_id for instance_id in self._members if instance_id not in named]
        for instance_id in leaving:
            if not self._members[instance_id].from_source:
                del self._members[instance_id]
        leaving = [instance_id for instance_id in leaving if instance_id in self._members]
        if not leaving or self._members.keys() & named.keys() & accepting:
            self._held_since = None
        elif self._held_since is None:
            self._held_since = now
        if self._held_since is not None and now - self._held_since < HELD_SECONDS:
            return
        self._held_since = None
        for instance_id in leaving:
            member = self._members.pop(instance_id)
            forgiven = int((now - member.since) / FORGIVEN_SECONDS)
            self._left[instance_id] = _Left(now, max(0, member.times_left - forgiven) + 1)

    def _take_in(self, named: Mapping[str, InstanceSpec], now: float, accepting: Set[str]) -> None:
        nobody = not self._members.keys() & accepting
        for instance_id, spec in named.items():
            from_source = instance_id not in self._configured and instance_id not in self._added
            member = self._members.get(instance_id)
            if member is not None:
                member.spec, member.from_source = spec, from_source
                continue
            left = self._left.get(instance_id)
            if left is not None and now < left.returns_at and from_source and not nobody:
                continue
            self._left.pop(instance_id, None)
            self._members[instance_id] = _Member(spec, now, 0 if left is None else left.times, from_source)

    # ------------------------------------------------------------------ what is known

    @property
    def added(self) -> Mapping[str, InstanceSpec]:
        """What operators added."""
        return self._added

    @property
    def drained(self) -> Set[str]:
        """Whom operators took out."""
        return self._drained

    def named(self) -> list[Named]:
        """Every instance that anybody names or that is kept, and who names it."""
        by: dict[str, list[str]] = {instance_id: ["the configuration"] for instance_id in self._configured}
        for source in self._sources:
            for instance_id in sorted(source.named):
                by.setdefault(instance_id, []).append(source.name)
        for instance_id in self._added:
            by.setdefault(instance_id, []).append("an operator")
        for instance_id in (*self._members, *sorted(self._drained)):
            by.setdefault(instance_id, [])
        return [
            Named(instance_id, self._state(instance_id, bool(names)), tuple(names)) for instance_id, names in by.items()
        ]

    def _state(self, instance_id: str, is_named: bool) -> State:
        if instance_id in self._drained:
            return State.DRAINED
        if instance_id in self._members:
            return State.MEMBER if is_named else State.KEPT
        return State.WAITING

    def found(self) -> list[Finding]:
        """What an operator should know."""
        found = [self._about_source(source) for source in self._sources if source.trouble]
        if self._held_since is not None:
            kept = [instance_id for instance_id in self._members if instance_id not in self._named()]
            found.append(
                self._finding(
                    id="instances-kept",
                    severity=Severity.WARNING,
                    sentence=f"Nothing names {', '.join(kept)} of pool {self._pool} any more, but no other instance "
                    "of it accepts requests.",
                    why=f"They stay for {HELD_SECONDS / 60:.0f} minutes, so that one wrong answer does not empty the "
                    "pool; then they leave.",
                    fix="If they are gone on purpose there is nothing to do; otherwise look at where the pool's "
                    "instances come from.",
                )
            )
        if self._drained:
            found.append(
                self._finding(
                    id="instances-drained",
                    severity=Severity.WARNING,
                    sentence=f"Operators drained {', '.join(sorted(self._drained))} of pool {self._pool}.",
                    why="They get no requests, and the capacity is smaller.",
                    fix="Add them again when they may come back; see docs/howto/elastic-fleets.md.",
                )
            )
        if self._sources and not self._members:
            found.append(
                self._finding(
                    id="pool-empty",
                    severity=Severity.ERROR,
                    sentence=f"Pool {self._pool} has no instance: none is named by {_either(self._sources)}.",
                    why="Every request for its models fails.",
                    fix="Start an engine, or correct where the pool's instances come from.",
                )
            )
        return found

    def _about_source(self, source: SourceState) -> Finding:
        if source.answered:
            sentence = f"Pool {self._pool} cannot follow {source.name}: {source.trouble}."
            why = "The instances of its last good answer stay; those that come or go since are not seen."
        else:
            sentence = f"Pool {self._pool} has never had an answer from {source.name}: {source.trouble}."
            why = "No instance comes from there."
        return self._finding(
            id="source-failed",
            severity=Severity.WARNING,
            sentence=sentence,
            why=why,
            fix="Correct what it says; it is asked again by itself.",
        )

    def _finding(self, *, id: str, severity: Severity, sentence: str, why: str, fix: str) -> Finding:
        return Finding(id=id, severity=severity, pool=self._pool, instance_id=None, sentence=sentence, why=why, fix=fix)


def _either(sources: Sequence[SourceState]) -> str:
    return " or ".join(source.name for source in sources)
