"""Adaptive capacity: how far below its part of C an instance is held, from what its own queue says (`trim: true`).

Where requests wait inside an engine although the gateway sent no more than the instance's part of C, that part is
more than the engine runs at once: its KV cache is too small for the requests of now, say. Batch work within its share
then waits there behind other teams' interactive work, where no reservation reaches it. So the part falls until nothing
waits, and rises again when nothing does. docs/howto/adaptive-capacity.md measures what the rule brings and costs.
"""

from collections import deque

SCRAPES_JUDGED = 3
"""The rule looks at this many scrapes: one of them may have met a burst."""

WAITING_TO_FALL = 2.0
"""Mean of `num_requests_waiting` over these at which a slot is taken away. One that waits now and then is the refill of
a seat on its way; two are a queue."""


class Trim:
    """One instance's trimmed slots. Pure: fed by scrapes, at whatever pace they come."""

    __slots__ = ("_waiting", "slots")

    def __init__(self) -> None:
        self._waiting: deque[int] = deque(maxlen=SCRAPES_JUDGED)
        self.slots = 0
        """By how many slots the instance is held below its part of C."""

    def effective(self, part_slots: int) -> int:
        """What it gets of a part of C: never more than the part, and of any part at least one slot."""
        return max(min(1, part_slots), part_slots - self.slots)

    def scraped(self, waiting: int, *, in_flight_slots: int, part_slots: int) -> int:
        """The engine reported how many sequences wait there. Returns how many slots this changed (-1, 0 or 1).

        Args:
            waiting: `num_requests_waiting`.
            in_flight_slots: what the gateway has there. Above the effective part (owners are never held, and what runs
                stays when the part falls) a queue says nothing about that part.
            part_slots: the instance's untrimmed part of C.
        """
        self._waiting.append(waiting)
        if len(self._waiting) < SCRAPES_JUDGED:
            return 0
        effective = self.effective(part_slots)
        if sum(self._waiting) >= WAITING_TO_FALL * SCRAPES_JUDGED:
            if effective <= 1 or in_flight_slots > effective:
                return 0
            # From what is in force: a part that shrank meanwhile leaves no older trim to be worked off first.
            self.slots = part_slots - effective + 1
            return -1
        if not any(self._waiting) and effective < part_slots:
            self.slots = part_slots - effective - 1
            self._waiting.clear()
            return 1
        return 0

    def silent(self) -> None:
        """A scrape was not answered: what was seen before no longer stands for now."""
        self._waiting.clear()
