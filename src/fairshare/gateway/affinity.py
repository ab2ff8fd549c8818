"""Which instance likely holds a prompt's beginning in its prefix cache, and which one holds a stored response.

Learnt from where requests were sent: each key of a prefix leads to the instance that got it last. Measured against
rendezvous hashing of what nobody has sent yet (docs/decisions/0006-prefix-caches.md): the emptiest instance is better.
"""

import re
from collections.abc import Container, Sequence

from fairshare.wire.prefix import BOUNDARIES

MAX_PREFIXES = 1 << 17
"""Prefixes remembered per pool, those used last: about 10 MB. A prompt of 8 KB has 7, one of 64 KB 16."""

LEAST_PART = 0.25
"""A shorter part of the prompt than this is not worth an instance that is busier: system prompts that all share are
on every instance, and following them would send everybody to the same one."""

MAX_PREFERRED = 3
"""How many instances are named for one request."""


class PrefixMemory:
    """Key of a prefix → the instance it was sent to last; bounded."""

    __slots__ = ("_instance_of", "_limit")

    def __init__(self, limit: int = MAX_PREFIXES) -> None:
        self._instance_of: dict[int, str] = {}
        self._limit = limit

    def __len__(self) -> int:
        return len(self._instance_of)

    def preferred(self, keys: Sequence[int], accepting: Container[str]) -> Sequence[str]:
        """The accepting instances that likely hold most of the prompt with these keys, best first."""
        found: list[str] = []
        least_bytes = LEAST_PART * BOUNDARIES[len(keys) - 1][1] if keys else 0.0
        for index in range(len(keys) - 1, -1, -1):
            if BOUNDARIES[index][1] < least_bytes:
                break
            instance_id = self._instance_of.get(keys[index])
            if instance_id is not None and instance_id not in found and instance_id in accepting:
                found.append(instance_id)
                if len(found) == MAX_PREFERRED:
                    break
        return found

    def sent(self, keys: Sequence[int], instance_id: str) -> None:
        """A prompt with these keys was sent there."""
        instance_of = self._instance_of
        for key in keys:
            instance_of.pop(key, None)  # so that it becomes the newest
            instance_of[key] = instance_id
        while len(instance_of) > self._limit:
            del instance_of[next(iter(instance_of))]


MAX_RESPONSES = 1 << 16
"""Stored responses remembered per pool, the last ones: about 8 MB when full."""

_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,128})"')

_RESPONSE_ID_BYTES = 4096
"""An answer names its id at its beginning, also in the first event of a stream."""


class ResponseMemory:
    """Id of a stored response → the instance that keeps it; bounded. Engines keep them in memory of their own."""

    __slots__ = ("_instance_of", "_limit")

    def __init__(self, limit: int = MAX_RESPONSES) -> None:
        self._instance_of: dict[str, str] = {}
        self._limit = limit

    def __len__(self) -> int:
        return len(self._instance_of)

    def instance_of(self, response_id: str) -> str | None:
        """The instance that gave this response, if it is remembered."""
        return self._instance_of.get(response_id)

    def answered(self, beginning: bytes, instance_id: str) -> None:
        """An instance began to answer with these bytes."""
        found = _RESPONSE_ID.search(beginning, 0, _RESPONSE_ID_BYTES)
        if found is not None:
            self._instance_of[found[1].decode("ascii")] = instance_id
            if len(self._instance_of) > self._limit:
                del self._instance_of[next(iter(self._instance_of))]
