"""The modes of a pool: `make_queue` returns the dispatch queue for one (`hold` and `pass`: `fairshare.core.hold`)."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from fairshare.core.decisions import (
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
from fairshare.core.hold import HoldQueue
from fairshare.core.pool import Pool
from fairshare.core.priority import Standing

if TYPE_CHECKING:
    from collections.abc import Sequence


class ObserveQueue:
    """Everything goes to an engine at once and without any priority; a shadow shows what `hold` would have done.

    To try fairshare out without risk, and the kill switch. The pool counts grants and usage as ever.
    """

    def __init__(self, through: HoldQueue, *, options: HoldOptions | None = None) -> None:
        self.mode = Mode.OBSERVE
        pool = through.pool
        self.through = through
        """The queue that sends, in `pass` mode."""
        self._shadow_pool = Pool(pool.name, pool.capacity, pool.exact_shares, pool.half_life_seconds, pool.clock)
        self._shadow = HoldQueue(self._shadow_pool, options=options, instances=through.instances())
        self._copy_usage()

    @property
    def pool(self) -> Pool:
        """The pool in which grants are counted."""
        return self.through.pool

    def submitted(self, request: Request) -> list[Decision]:
        """Sends the request, or refuses it if no instance accepts any."""
        decisions = self._without_priority(self.through.submitted(request))
        if any(isinstance(decision, Send) for decision in decisions):
            self._watch(self._shadow.submitted(request))
        return decisions

    def first_byte(self, request_id: str) -> list[Decision]:
        """The client received something."""
        self._watch(self._shadow.first_byte(request_id))
        return self.through.first_byte(request_id)

    def released(self, request_id: str, consumed_cost_units: float) -> list[Decision]:
        """The engine has finished; if `hold` would still hold the request, its cost is charged all the same."""
        team = self._shadow.held_team(request_id)
        if team is not None:
            self._shadow_pool.charge(team, consumed_cost_units)
            self._watch(self._shadow.cancelled(request_id))
        else:
            self._watch(self._shadow.released(request_id, consumed_cost_units))
        return self._without_priority(self.through.released(request_id, consumed_cost_units))

    def cancelled(self, request_id: str) -> list[Decision]:
        """A request left; it can be held only since before the pool was told to observe."""
        return self._without_priority(self.through.cancelled(request_id))

    def aborted(self, request_id: str) -> list[Decision]:
        """A request is aborted; it was taken back before the pool was told to observe."""
        return self._without_priority(self.through.aborted(request_id))

    def reassigned(self, request_id: str, excluding: frozenset[str]) -> str | None:
        """Move a dispatched request's grant to another instance."""
        return self.through.reassigned(request_id, excluding)

    def adopted(
        self, request: Request, *, instance_id: str, priority: int | None, standing: Standing, began: bool
    ) -> list[Decision]:
        """Count a request that runs already, here and in the shadow."""
        self._watch(
            self._shadow.adopted(request, instance_id=instance_id, priority=priority, standing=standing, began=began)
        )
        return self._without_priority(
            self.through.adopted(request, instance_id=instance_id, priority=priority, standing=standing, began=began)
        )

    def capacity_changed(self) -> list[Decision]:
        """The pool's C, shares, half-life or usage changed; the shadow follows."""
        pool = self.through.pool
        self._shadow_pool.set_capacity(pool.capacity)
        self._shadow_pool.set_shares(pool.exact_shares)
        self._shadow_pool.set_half_life(pool.half_life_seconds)
        self._copy_usage()
        self._watch(self._shadow.capacity_changed())
        return self._without_priority(self.through.capacity_changed())

    def instance_changed(self, instance: Instance) -> list[Decision]:
        """An instance is new, or its record changed."""
        self._watch(self._shadow.instance_changed(instance))
        return self._without_priority(self.through.instance_changed(instance))

    def instance_removed(self, instance_id: str) -> list[Decision]:
        """An instance is gone."""
        self._watch(self._shadow.instance_removed(instance_id))
        return self._without_priority(self.through.instance_removed(instance_id))

    def running_seen(self, instance_id: str, running: int) -> list[Decision]:
        """An instance reported `num_requests_running`."""
        self._watch(self._shadow.running_seen(instance_id, running))
        return self.through.running_seen(instance_id, running)

    def tick(self) -> list[Decision]:
        """Time passed."""
        self._watch(self._shadow.tick())
        return self._without_priority(self.through.tick())

    def next_deadline(self) -> float | None:
        """When the queue or its shadow has something to do."""
        deadlines = (self.through.next_deadline(), self._shadow.next_deadline())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def snapshot(self) -> QueueStat:
        """What `hold` would hold and have recalled, beside what really runs where."""
        return replace(self._shadow.snapshot(), mode=self.mode, instances=self.through.snapshot().instances)

    def _watch(self, decisions: "Sequence[Decision]") -> None:
        """The shadow's recalls are aborted at once; its other decisions are only counted."""
        for decision in decisions:
            if isinstance(decision, Recall):
                self._watch(self._shadow.aborted(decision.request_id))

    def _without_priority(self, decisions: list[Decision]) -> list[Decision]:
        """Of what is sent here. The end of a request that was sent elsewhere before may send that pool's own."""
        name = self.pool.name
        return [
            replace(decision, priority=None) if isinstance(decision, Send) and decision.pool == name else decision
            for decision in decisions
        ]

    def _copy_usage(self) -> None:
        usage, _ = self.through.pool.usage()
        for team, cost_units in usage.items():
            self._shadow_pool.set_usage(team, cost_units)


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
    if mode is Mode.OBSERVE:
        return ObserveQueue(HoldQueue(pool, mode=Mode.PASS, instances=instances), options=options)
    return HoldQueue(pool, mode=mode, options=options, instances=instances, fallback=_checked(fallback, pool))


def changed_queue(
    queue: DispatchQueue, mode: Mode, *, options: HoldOptions | None = None, fallback: DispatchQueue | None = None
) -> DispatchQueue:
    """The queue of the same pool that dispatches differently from now on: what is held and what runs stays in it.

    Use it in place of `queue`, and report `capacity_changed` to it.

    Args:
        queue: made by `make_queue`.
        mode: as of `make_queue`, and so the other two.

    Raises:
        ValueError: the fallback observes only.
    """
    kept = queue.through if isinstance(queue, ObserveQueue) else queue
    assert isinstance(kept, HoldQueue), "a queue that this module made"
    if mode is Mode.OBSERVE:
        kept.reconfigure(Mode.PASS, None, None)
        return ObserveQueue(kept, options=options)
    kept.reconfigure(mode, options, _checked(fallback, kept.pool))
    return kept


def _checked(fallback: DispatchQueue | None, pool: Pool) -> HoldQueue | None:
    if fallback is not None and not isinstance(fallback, HoldQueue):
        raise ValueError(f"pool {fallback.pool.name!r} is in mode observe and cannot be the fallback of {pool.name!r}")
    return fallback
