"""The modes of a pool: `make_queue` returns the dispatch queue for one (`hold` is in `fairshare.core.hold`)."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from fairshare.core.decisions import (
    BorrowOrder,
    Decision,
    DispatchQueue,
    HoldOptions,
    Instance,
    Mode,
    QueueStat,
    Recall,
    Request,
    Send,
)
from fairshare.core.hold import HoldQueue, SendKind
from fairshare.core.pool import Pool
from fairshare.core.priority import Standing

if TYPE_CHECKING:
    from collections.abc import Sequence


class PassQueue(HoldQueue):
    """Every request goes to an engine at once, with the standing it has on arrival (`dispatch: pass`).

    In flight is then what engines run and what waits in them. Kept for comparison and for engines whose own queue must
    order everything: behind a backlog the reservation does not hold (docs/proof.md).
    """

    mode = Mode.PASS

    def __init__(self, pool: Pool, *, instances: Iterable[Instance] = (), fallback: HoldQueue | None = None) -> None:
        # Nothing is recalled and nothing is ordered here.
        options = HoldOptions(recall=False, batch_every=0, borrow_order=BorrowOrder.LEVEL_FAIRSHARE)
        super().__init__(pool, options=options, instances=instances, fallback=fallback)

    def _dispatch(self, now: float, decisions: list[Decision]) -> None:
        self._came_due = False
        if self._generation != self._pool.generation:
            self._rebuild(now)
        while self._held:
            team = self._teams[next(iter(self._held.values())).request.team]
            entry = self._next_entry(team)
            team.state = self._pool.state(team.name)
            counted_slots = team.state.in_flight_slots + team.state.phantom_slots + entry.request.slots
            borrows = counted_slots > team.state.reserved
            if borrows and self._fallback is not None and not self._has_room():
                self._send_one_to_fallback(team, entry, now, decisions)
                if entry.queue is not None:
                    continue
            if not self._instances.any_accepting:
                break
            self._send(team, entry, SendKind.BORROWER if borrows else SendKind.OWNER, now, decisions)
        for name in self._changed:
            if (team := self._teams.get(name)) is not None:
                self._forget_if_idle(team)
        self._changed.clear()


class ObserveQueue:
    """Everything goes to an engine at once and without any priority; a shadow shows what `hold` would have done.

    To try fairshare out without risk, and the kill switch. The pool counts grants and usage as ever.
    """

    mode = Mode.OBSERVE

    def __init__(self, pool: Pool, *, options: HoldOptions | None = None, instances: Iterable[Instance] = ()) -> None:
        instances = tuple(instances)
        self._through = PassQueue(pool, instances=instances)
        self._shadow_pool = Pool(pool.name, pool.capacity, pool.exact_shares, pool.half_life_seconds, pool.clock)
        self._shadow = HoldQueue(self._shadow_pool, options=options, instances=instances)
        self._copy_usage()

    @property
    def pool(self) -> Pool:
        """The pool in which grants are counted."""
        return self._through.pool

    def submitted(self, request: Request) -> list[Decision]:
        """Sends the request, or refuses it if no instance accepts any."""
        decisions = [_without_priority(decision) for decision in self._through.submitted(request)]
        if any(isinstance(decision, Send) for decision in decisions):
            self._watch(self._shadow.submitted(request))
        return decisions

    def first_byte(self, request_id: str) -> list[Decision]:
        """The client received something."""
        self._watch(self._shadow.first_byte(request_id))
        return self._through.first_byte(request_id)

    def released(self, request_id: str, consumed_cost_units: float) -> list[Decision]:
        """The engine has finished; if `hold` would still hold the request, its cost is charged all the same."""
        team = self._shadow.held_team(request_id)
        if team is not None:
            self._shadow_pool.charge(team, consumed_cost_units)
            self._watch(self._shadow.cancelled(request_id))
        else:
            self._watch(self._shadow.released(request_id, consumed_cost_units))
        return self._through.released(request_id, consumed_cost_units)

    def cancelled(self, request_id: str) -> list[Decision]:
        """Nothing is held, so nothing can be cancelled before it is dispatched."""
        return self._through.cancelled(request_id)

    def aborted(self, request_id: str) -> list[Decision]:
        """Nothing is recalled, so nothing is aborted."""
        return self._through.aborted(request_id)

    def reassigned(self, request_id: str, excluding: frozenset[str]) -> str | None:
        """Move a dispatched request's grant to another instance."""
        return self._through.reassigned(request_id, excluding)

    def adopted(
        self, request: Request, *, instance_id: str, priority: int | None, standing: Standing, began: bool
    ) -> list[Decision]:
        """Count a request that runs already, here and in the shadow."""
        self._watch(
            self._shadow.adopted(request, instance_id=instance_id, priority=priority, standing=standing, began=began)
        )
        return self._through.adopted(
            request, instance_id=instance_id, priority=priority, standing=standing, began=began
        )

    def capacity_changed(self) -> list[Decision]:
        """The pool's C, shares, half-life or usage changed; the shadow follows."""
        pool = self._through.pool
        self._shadow_pool.set_capacity(pool.capacity)
        self._shadow_pool.set_shares(pool.exact_shares)
        self._shadow_pool.set_half_life(pool.half_life_seconds)
        self._copy_usage()
        self._watch(self._shadow.capacity_changed())
        return self._through.capacity_changed()

    def instance_changed(self, instance: Instance) -> list[Decision]:
        """An instance is new, or its record changed."""
        self._watch(self._shadow.instance_changed(instance))
        return self._through.instance_changed(instance)

    def instance_removed(self, instance_id: str) -> list[Decision]:
        """An instance is gone."""
        self._watch(self._shadow.instance_removed(instance_id))
        return self._through.instance_removed(instance_id)

    def running_seen(self, instance_id: str, running: int) -> list[Decision]:
        """An instance reported `num_requests_running`."""
        self._watch(self._shadow.running_seen(instance_id, running))
        return self._through.running_seen(instance_id, running)

    def tick(self) -> list[Decision]:
        """Time passed."""
        self._watch(self._shadow.tick())
        return self._through.tick()

    def next_deadline(self) -> float | None:
        """When the shadow has something to do."""
        return self._shadow.next_deadline()

    def snapshot(self) -> QueueStat:
        """What `hold` would hold and have recalled, beside what really runs where."""
        return replace(self._shadow.snapshot(), mode=self.mode, instances=self._through.snapshot().instances)

    def _watch(self, decisions: "Sequence[Decision]") -> None:
        """The shadow's recalls are aborted at once; its other decisions are only counted."""
        for decision in decisions:
            if isinstance(decision, Recall):
                self._watch(self._shadow.aborted(decision.request_id))

    def _copy_usage(self) -> None:
        usage, _ = self._through.pool.usage()
        for team, cost_units in usage.items():
            self._shadow_pool.set_usage(team, cost_units)


def _without_priority(decision: Decision) -> Decision:
    return replace(decision, priority=None) if isinstance(decision, Send) else decision


def make_queue(
    pool: Pool,
    mode: Mode,
    *,
    options: HoldOptions | None = None,
    instances: Iterable[Instance] = (),
    fallback: DispatchQueue | None = None,
) -> DispatchQueue:
    """The dispatch queue of a pool.

    Args:
        pool: counts the grants.
        mode: when standing is decided.
        options: of `hold` (and of what `observe` compares with).
        instances: those known from the start; more come by `instance_changed`.
        fallback: the queue of the pool whose free room this one may use for its borrowers.

    Raises:
        ValueError: the fallback observes only, so it could not keep a guest in its place.
    """
    if fallback is not None and not isinstance(fallback, HoldQueue):
        raise ValueError(f"pool {fallback.pool.name!r} is in mode observe and cannot be the fallback of {pool.name!r}")
    match mode:
        case Mode.HOLD:
            return HoldQueue(pool, options=options, instances=instances, fallback=fallback)
        case Mode.PASS:
            return PassQueue(pool, instances=instances, fallback=fallback)
        case Mode.OBSERVE:
            return ObserveQueue(pool, options=options, instances=instances)
