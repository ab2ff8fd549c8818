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
- *How often?* Only `CASES` guilty ones, with hardly any that show the opposite among the last `MEMORY`, make a verdict.

Pure: events in, counts out. Times are on one clock of the caller, in seconds.
"""

import math
from collections import deque
from dataclasses import dataclass, field

CASES = 20
"""Guilty cases before anything is said."""

MEMORY = 50
"""How many of the last cases of an instance count."""

INNOCENT_LIMIT = 2
"""More cases than this among them in which a lazier request was overtaken: the engine does order."""

LEAST_WAITING = 3
"""Lazier requests that must surely wait for a case. With fewer, a step's worth of reordering could be the reason."""

OWN_SLOWNESS_FACTOR = 3.0
"""How many times its unhindered first byte an urgent request must have waited."""

JITTER_SECONDS = 0.25
"""Added to that: what network and event loop may do to both ends of a measurement."""

UNHINDERED_SAMPLES = 10
"""Measures of unhindered first bytes of the team's requests of that size before a case can count."""

UNHINDERED_MEMORY = 200
"""Unhindered first bytes remembered per instance."""


LOOK_SECONDS = 0.5
"""An instance's queue is looked through for a case at most this often: looking costs time, cases are plenty."""


@dataclass(slots=True, eq=False)
class _Sent:
    """A request that an engine has and has not finished."""

    instance_id: str
    team: str
    priority: int
    slots: int
    prompt_size: int
    streaming: bool
    sent_at: float
    unhindered: bool
    answered: bool = False


@dataclass(slots=True)
class _Case:
    """An urgent request whose first byte is awaited, and the lazier ones that waited when it was sent."""

    urgent: _Sent
    waiting: list[_Sent]
    surely_waiting: int


@dataclass(slots=True)
class _Instance:
    seats: int | None = None
    answered_slots: int = 0
    """Of requests that have answered and not ended: they run."""
    pending_slots: int = 0
    pending: dict[str, _Sent] = field(default_factory=dict[str, _Sent])
    """Sent and without a first byte, in the order in which they were sent."""
    case: _Case | None = None
    look_at: float = -math.inf
    """The next look for a case."""
    guilty: deque[bool] = field(default_factory=lambda: deque(maxlen=MEMORY))
    unhindered: deque[tuple[str, int, float]] = field(default_factory=lambda: deque(maxlen=UNHINDERED_MEMORY))
    """(team, prompt size, seconds to the first byte) of requests sent while seats were free."""


class PriorityWatch:
    """Watches all instances of a gateway. One case at a time per instance, so that its cost stays small."""

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
        *,
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
        request = _Sent(
            instance_id=instance_id,
            team=team,
            priority=priority,
            slots=slots,
            prompt_size=prompt_size,
            streaming=streaming,
            sent_at=now,
            unhindered=instance.answered_slots + instance.pending_slots + slots <= seats,
        )
        if streaming and instance.case is None and now >= instance.look_at:
            instance.look_at = now + LOOK_SECONDS
            self._open_case(instance, request, seats)
        self._sent[request_id] = request
        instance.pending[request_id] = request
        instance.pending_slots += slots

    def first_byte(self, request_id: str, *, now: float) -> None:
        """Something of its answer came from the engine."""
        request = self._sent.get(request_id)
        if request is None or request.answered:
            return
        request.answered = True
        instance = self._instances[request.instance_id]
        del instance.pending[request_id]
        instance.pending_slots -= request.slots
        instance.answered_slots += request.slots
        if request.unhindered and request.streaming:
            instance.unhindered.append((request.team, request.prompt_size, now - request.sent_at))
        if instance.case is not None and instance.case.urgent is request:
            self._close_case(instance, instance.case, now)

    def ended(self, request_id: str) -> None:
        """The engine has finished with it, or it was aborted there."""
        request = self._sent.pop(request_id, None)
        if request is None:
            return
        instance = self._instances[request.instance_id]
        if request.answered:
            instance.answered_slots -= request.slots
        else:
            del instance.pending[request_id]
            instance.pending_slots -= request.slots
        case = instance.case
        if case is None:
            return
        if case.urgent is request:
            instance.case = None  # no first byte will come
        elif not request.answered and request in case.waiting:
            # It left the queue by itself, so whether it would have been overtaken is not known.
            case.waiting.remove(request)
            case.surely_waiting -= 1
            if case.surely_waiting < LEAST_WAITING:
                instance.case = None

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
        lazier = [
            pending for pending in instance.pending.values() if pending.streaming and pending.priority > urgent.priority
        ]
        if not lazier:
            return
        # The worst that could be: everything that computes its prompt now is among the lazier ones.
        may_be_computing = max(0, seats - instance.answered_slots)
        surely_waiting = len(lazier) - may_be_computing
        if surely_waiting >= LEAST_WAITING:
            instance.case = _Case(urgent=urgent, waiting=lazier, surely_waiting=surely_waiting)

    def _close_case(self, instance: _Instance, case: _Case, now: float) -> None:
        instance.case = None
        overtaken = any(not waiting.answered for waiting in case.waiting)
        if overtaken:
            instance.guilty.append(False)
            return
        alike = [
            seconds
            for team, prompt_size, seconds in instance.unhindered
            if team == case.urgent.team and prompt_size >= case.urgent.prompt_size / 2
        ]
        if len(alike) < UNHINDERED_SAMPLES:
            return
        if now - case.urgent.sent_at >= OWN_SLOWNESS_FACTOR * max(alike) + JITTER_SECONDS:
            instance.guilty.append(True)
