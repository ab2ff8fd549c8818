"""A heap of names whose priorities change: what the dispatch queue orders teams and instances with."""

import heapq
from typing import Any, Generic, TypeVar

Priority = TypeVar("Priority", bound=float | tuple[Any, ...])


class KeyedHeap(Generic[Priority]):
    """Names ordered by a priority that may change. `set`, `discard` and `peek` are O(log n) amortised.

    A changed priority is pushed again and the old entry is skipped when it surfaces; when more than half of the
    entries are old, the heap is built anew, so its size stays within twice the number of names.
    """

    __slots__ = ("_heap", "priorities")

    def __init__(self) -> None:
        self._heap: list[tuple[Priority, str]] = []
        self.priorities: dict[str, Priority] = {}
        """Name to priority of all that is in it; only for reading (whether anything is in it is asked all the time)."""

    def set(self, name: str, priority: Priority) -> None:
        """Put `name` at `priority` (smallest first; equal priorities in the order of names)."""
        if self.priorities.get(name) == priority:
            return
        self.priorities[name] = priority
        if len(self._heap) > 2 * len(self.priorities) + 8:
            self._heap = [(known, key) for key, known in self.priorities.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (priority, name))

    def discard(self, name: str) -> None:
        """Take `name` out; nothing happens if it is not there."""
        if self.priorities.pop(name, None) is not None and not self.priorities:
            self._heap.clear()

    def peek(self) -> str | None:
        """The name with the smallest priority; None when empty."""
        heap, priorities = self._heap, self.priorities
        while heap:
            priority, name = heap[0]
            if priorities.get(name) == priority:
                return name
            heapq.heappop(heap)
        return None

    def first_priority(self) -> Priority | None:
        """The smallest priority; None when empty."""
        name = self.peek()
        return None if name is None else self.priorities[name]

    def clear(self) -> None:
        """Take everything out."""
        self._heap.clear()
        self.priorities.clear()
