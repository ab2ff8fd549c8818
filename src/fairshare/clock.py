"""The one place that reads clocks. Everything else is handed a clock."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds. Only differences mean anything, unless the name says wall clock."""

monotonic: Clock = time.monotonic
"""Seconds that never step back; the pools' clock."""

wall: Clock = time.time
"""Seconds since 1970-01-01 UTC; for records and messages that people read."""
