"""Finished requests, handed to a thread of their own: what it runs into never holds up the event loop."""

import threading
from abc import ABC, abstractmethod
from collections import deque

from fairshare.gateway.ports import RequestRecord

END_SECONDS = 2.0
"""How long the end may wait for what is not written yet."""


class RecordThread(ABC):
    """A `Recorder` that appends a reference to a queue and does nothing else; its thread does the work.

    What a full queue does not take is counted and lost: serving goes on.
    """

    def __init__(self, name: str, *, every_seconds: float, most_waiting: int) -> None:
        self._every_seconds = every_seconds
        self._most_waiting = most_waiting
        self._waiting: deque[RequestRecord] = deque()
        self._lost = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep_writing, name=name, daemon=True)

    # ------------------------------------------------------------------ on the event loop

    def finished(self, record: RequestRecord) -> None:
        if len(self._waiting) < self._most_waiting:
            self._waiting.append(record)
        else:
            self._lost += 1

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Write what waits, for at most `END_SECONDS`."""
        self._ending.set()
        self._thread.join(END_SECONDS)

    # ------------------------------------------------------------------ on its thread

    def _keep_writing(self) -> None:
        while not self._ending.wait(self._every_seconds):
            self.write()
        self.write()

    def write(self) -> None:
        """Write everything that waits now."""
        records = [self._waiting.popleft() for _ in range(len(self._waiting))]
        lost, self._lost = self._lost, 0
        self.take(records, lost)

    @abstractmethod
    def take(self, records: list[RequestRecord], lost: int) -> None:
        """Write these; so many were lost before them. Must not raise."""
