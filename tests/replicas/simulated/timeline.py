"""Virtual time: what happens when, in an order that a seed fixes."""

import heapq
from collections.abc import Callable
from itertools import count


class Timeline:
    """Things to do at points in true time, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._tie_breaker = count()

    def at(self, when: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._tie_breaker), do))

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        self.at(self.now + seconds, do)

    def step(self) -> bool:
        """Do the next thing; False: there is none."""
        if not self._events:
            return False
        self.now, _, do = heapq.heappop(self._events)
        do()
        return True
