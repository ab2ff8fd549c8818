"""SGLang's scheduler as a pure function of time, where it differs from vLLM's; read in the source of SGLang 0.5.23.

* Waiting requests are ordered by priority, then by the time they came; higher first unless `low_values_first`. (`lpm`
  and the other policies order within one priority only.)
* When every seat is taken, the head of the queue displaces running requests whose priority is worse by *more* than
  `preemption_threshold`: the worst first, of equals the one that came last. They wait again and compute it all again.
* A decoding request that finds no memory retracts the one with the least output, whatever its priority; with
  `--retraction-policy priority` the one with the worst.

Everything else (steps, chunked prefill, blocks) is as in `scheduler`. Requests admitted in the same step, and one whose
prompt is not computed yet, are not displaced.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from sys import maxsize

from fairshare.engine.scheduler import Change, FinishReason, Running, Scheduler, SchedulerConfig

SGLANG_VERSION = "0.5.23"


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangOptions:
    """The flags of one SGLang server that concern priorities."""

    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    priority_scheduling_preemption_threshold: int = 10
    disable_priority_preemption: bool = False
    retraction_policy: str = "length"
    """`length` or `priority`."""

    def scheduler(
        self, config: SchedulerConfig, observer: Callable[[Change, str], None] | None = None
    ) -> "SglangScheduler":
        """Its scheduler. Without priority scheduling, `config.policy` must be `fcfs`."""
        by_priority = self.enable_priority_scheduling
        displaces = by_priority and not self.disable_priority_preemption
        return SglangScheduler(
            config,
            observer,
            low_values_first=self.schedule_low_priority_values_first,
            preemption_threshold=self.priority_scheduling_preemption_threshold if displaces else None,
            retracts_by_priority=by_priority and self.retraction_policy == "priority",
        )


class SglangScheduler(Scheduler):
    """One SGLang engine with `--enable-priority-scheduling`."""

    def __init__(
        self,
        config: SchedulerConfig,
        observer: Callable[[Change, str], None] | None = None,
        *,
        low_values_first: bool = False,
        preemption_threshold: int | None = 10,
        retracts_by_priority: bool = False,
    ) -> None:
        """`preemption_threshold` None: `--disable-priority-preemption`."""
        super().__init__(config, observer)
        self._sign = 1 if low_values_first else -1
        self._threshold = preemption_threshold
        self._retracts_by_priority = retracts_by_priority

    def add(
        self,
        request_id: str,
        *,
        prompt_tokens: int,
        output_tokens: int,
        priority: int | None = None,
        arrival: float | None = None,
        reason: FinishReason = FinishReason.LENGTH,
        block_keys: Sequence[Hashable] = (),
    ) -> None:
        """As a vLLM's; without a priority it waits behind all that have one."""
        super().add(
            request_id,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            priority=maxsize if priority is None else self._sign * priority,
            arrival=arrival,
            reason=reason,
            block_keys=block_keys,
        )

    def _admit(self, budget: int) -> int:
        running_before = self._admissions
        while True:
            budget = super()._admit(budget)
            is_full = len(self._running) >= self.config.max_num_seqs
            if budget <= 0 or not self._waiting_count or not is_full or not self._displace(running_before):
                return budget

    def _head_gets_a_seat(self) -> bool:
        is_full = len(self._running) >= self.config.max_num_seqs
        if self._waiting_count and is_full:
            return self._displaced(self._admissions) is not None
        return super()._head_gets_a_seat()

    def _displaced(self, running_before: int) -> Running | None:
        """The worst running request, if it is worse than the head of the queue by enough."""
        candidates = [one for one in self._running.values() if one.decoding and one.admission <= running_before]
        if self._threshold is None or not candidates:
            return None
        victim = max(candidates, key=lambda one: (one.priority, one.arrival))
        return victim if victim.priority - self._waiting.head().priority > self._threshold else None

    def _displace(self, running_before: int) -> bool:
        """Takes the seat of one running request for the head of the queue."""
        victim = self._displaced(running_before)
        if victim is None:
            return False
        self._granted_up_to = running_before  # they have got what they need for this step
        self._evict(victim)
        self._granted_up_to = -1
        return True

    def _worst(self) -> Running:
        return min(
            self._running.values(),
            key=lambda one: (
                -one.priority if self._retracts_by_priority else 0,
                self._generated(one),
                -one.prompt_tokens,
            ),
        )
