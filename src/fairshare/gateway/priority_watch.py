"""Notices in passing that an engine does not order by priority, from when requests were sent and when they answered.

vLLM with the default policy answers 200 and ignores every priority, so only behaviour shows it. The evidence is a
*case*: an urgent request goes to an instance while requests with a worse priority wait there in the engine's own queue.
An engine that orders by priority takes the urgent one next, before every one of them; an engine that does not lets all
of them go first. One case proves nothing (a long prompt gives its first token late although it started early), so
every way in which a well-behaved engine could look guilty is taken out before a case counts:

- *Was it waiting?* A request without a first byte may be computing its prompt. At most `seats` minus what has already
  answered can be doing that, so only what is pending beyond that number surely waits. Seats that are not known, and
  engines with several schedulers behind one port, give no case at all.
- *Was the urgent one slow for a reason of its own?* It must have waited several times as long as its team's requests of
  that size needed on the same instance when seats were free. Without such a measure there is no case.
- *Answers that are not streamed* give their first byte at their end and say nothing; they count as pending only.
- *Were they apart?* Seats that come free in one step are taken together; only clear distances in time count.
- *How often?* Only `CASES` guilty ones, with hardly any that show the opposite among the last `MEMORY`, make a verdict.

Pure: events in, counts out. Times are on one clock of the caller, in seconds.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import islice

import msgspec

CASES = 20
"""Guilty cases before anything is said."""

MEMORY = 50
"""How many of the last cases of an instance count."""

INNOCENT_LIMIT = 2
"""More cases than this among them in which lazier requests were overtaken: the engine does order."""

LEAST_WAITING = 3
"""Lazier requests that must surely wait for a case. With fewer, a step's worth of reordering could be the reason."""

OWN_SLOWNESS_FACTOR = 3.0
"""How many times its unhindered first byte an urgent request must have waited."""

JITTER_SECONDS = 0.25
"""First bytes closer together than this have no order: network, event loop, and seats that come free in one step."""

UNHINDERED_SAMPLES = 10
"""Measures of unhindered first bytes of the team's requests of that size before a case can count."""

UNHINDERED_MEMORY = 50
"""Unhindered first bytes remembered per instance and team."""


MOST_LAZIER = 100
"""So many of the lazier requests are followed in one case, the first sent first; more would only cost time."""


class _Sent(msgspec.Struct, eq=False, gc=False):
    """A request that an engine has and has not finished."""

    instance_id: str
    team: str
    priority: int
    slots: int
    prompt_size: int
    streaming: bool
    sent_at: float
    unhindered: bool
    answered_at: float | None = None


@dataclass(slots=True)
class _Case:
    """An urgent request, and the lazier ones that had no first byte when it was sent."""

    urgent: _Sent
    lazier: list[_Sent]
    may_be_computing: int
    """So many of them may not have waited, but computed their prompts."""


@dataclass(slots=True)
class _Instance:
    seats: int | None = None
    answered_slots: int = 0
    """Of requests that have answered and not ended: they run."""
    pending_slots: int = 0
    pending: dict[str, _Sent] = field(default_factory=dict[str, _Sent])
    """Streams that were sent and have no first byte, in the order in which they were sent."""
    streams_pending: Counter[int] = field(default_factory=Counter[int])
    """Priority → how many of them are streamed."""
    case: _Case | None = None
    guilty: deque[bool] = field(default_factory=lambda: deque(maxlen=MEMORY))
    unhindered: dict[str, deque[tuple[int, float]]] = field(default_factory=dict[str, deque[tuple[int, float]]])
    """Team → (prompt size, seconds to the first byte) of its requests that were sent while seats were free."""

    def no_longer_pending(self, request_id: str, request: _Sent) -> None:
        self.pending_slots -= request.slots
        if request.streaming:
            del self.pending[request_id]
            self.streams_pending[request.priority] -= 1
            if not self.streams_pending[request.priority]:
                del self.streams_pending[request.priority]


class PriorityWatch:
    """Watches all instances of a gateway. One case at a time per instance, so that it costs little."""

    def __init__(self) -> None:
        self._sent: dict[str, _Sent] = {}
        self._instances: dict[str, _Instance] = {}

    def know(self, instance_id: str, *, seats: int | None) -> None:
        """What an instance runs at most; None: that is not known for sure, so nothing can be said about it."""
        instance = self._instances.setdefault(instance_id, _Instance())
        if instance.seats != seats:
            instance.seats = seats
            self.forget(instance_id)

    def sent(
        self,
        request_id: str,
        instance_id: str,
        team: str,
        priority: int,
        slots: int,
        prompt_size: int,
        streaming: bool,
        now: float,
    ) -> None:
        """A request goes to an instance. `prompt_size`: in any unit that is the same for all requests."""
        instance = self._instances.get(instance_id)
        if instance is None or instance.seats is None:
            return
        seats = instance.seats
        pending_slots = instance.pending_slots + slots
        unhindered = instance.answered_slots + pending_slots <= seats
        request = _Sent(instance_id, team, priority, slots, prompt_size, streaming, now, unhindered)
        self._sent[request_id] = request
        if instance.case is not None:
            self._judge_if_due(instance, now)
        if streaming:
            if instance.case is None and len(instance.unhindered.get(team, ())) >= UNHINDERED_SAMPLES:
                self._open_case(instance, request, seats)
            instance.pending[request_id] = request
            instance.streams_pending[priority] += 1
        instance.pending_slots = pending_slots

    def first_byte(self, request_id: str, *, now: float) -> None:
        """Something of its answer came from the engine."""
        request = self._sent.get(request_id)
        if request is None or request.answered_at is not None:
            return
        request.answered_at = now
        instance = self._instances[request.instance_id]
        instance.no_longer_pending(request_id, request)
        instance.answered_slots += request.slots
        if request.unhindered and request.streaming:
            measures = instance.unhindered.get(request.team)
            if measures is None:
                measures = instance.unhindered[request.team] = deque(maxlen=UNHINDERED_MEMORY)
            measures.append((request.prompt_size, now - request.sent_at))
        self._judge_if_due(instance, now)

    def ended(self, request_id: str) -> None:
        """The engine has finished with it, or it was aborted there."""
        request = self._sent.pop(request_id, None)
        if request is None:
            return
        instance = self._instances[request.instance_id]
        if request.answered_at is not None:
            instance.answered_slots -= request.slots
            return
        instance.no_longer_pending(request_id, request)
        case = instance.case
        if case is not None:
            if case.urgent is request:
                instance.case = None  # no first byte will come
            elif request in case.lazier:
                # It left by itself; whether it would have been overtaken nobody knows.
                case.lazier.remove(request)

    def forget(self, instance_id: str) -> None:
        """The instance may have been restarted: what it did before says nothing about it now."""
        instance = self._instances.get(instance_id)
        if instance is not None:
            instance.case = None
            instance.guilty.clear()
            instance.unhindered.clear()

    def remove(self, instance_id: str) -> None:
        """The instance is gone for good."""
        if self._instances.pop(instance_id, None) is not None:
            self._sent = {id: sent for id, sent in self._sent.items() if sent.instance_id != instance_id}

    def contradictions(self, instance_id: str) -> int | None:
        """In how many of its last cases the instance ignored priority, when that is beyond chance; else None."""
        instance = self._instances.get(instance_id)
        if instance is None:
            return None
        guilty = sum(instance.guilty)
        innocent = len(instance.guilty) - guilty
        return guilty if guilty >= CASES and innocent <= INNOCENT_LIMIT else None

    def _open_case(self, instance: _Instance, urgent: _Sent, seats: int) -> None:
        # The worst that could be: everything that computes its prompt now is among the lazier ones.
        may_be_computing = max(0, seats - instance.answered_slots)
        count = sum(count for priority, count in instance.streams_pending.items() if priority > urgent.priority)
        if count - may_be_computing < LEAST_WAITING:
            return
        lazier = (sent for sent in instance.pending.values() if sent.priority > urgent.priority)
        instance.case = _Case(
            urgent=urgent, lazier=list(islice(lazier, MOST_LAZIER)), may_be_computing=may_be_computing
        )

    def _judge_if_due(self, instance: _Instance, now: float) -> None:
        case = instance.case
        if case is None or case.urgent.answered_at is None or now < case.urgent.answered_at + JITTER_SECONDS:
            return
        instance.case = None
        at = case.urgent.answered_at
        waited = len(case.lazier) - case.may_be_computing
        went_first = sum(
            lazy.answered_at is not None and lazy.answered_at < at - JITTER_SECONDS for lazy in case.lazier
        )
        overtaken = sum(lazy.answered_at is None or lazy.answered_at > at + JITTER_SECONDS for lazy in case.lazier)
        if overtaken >= waited / 2:
            instance.guilty.append(False)
        elif (
            went_first - case.may_be_computing >= LEAST_WAITING
            and overtaken <= waited / 4
            and self._slower_than_alone(instance, case.urgent, at - case.urgent.sent_at)
        ):
            instance.guilty.append(True)

    def _slower_than_alone(self, instance: _Instance, urgent: _Sent, seconds: float) -> bool:
        measures = instance.unhindered.get(urgent.team, ())
        alike = [alone_seconds for size, alone_seconds in measures if size >= urgent.prompt_size / 2]
        return len(alike) >= UNHINDERED_SAMPLES and seconds >= OWN_SLOWNESS_FACTOR * max(alike)
