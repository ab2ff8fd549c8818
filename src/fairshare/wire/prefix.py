"""Keys of a prompt's prefixes: equal keys mean (almost surely) that two prompts begin alike, up to there.

Engines cache what they computed for a prompt's beginning. Which instance likely holds it is guessed from these keys,
on the hot path: so they are made of the prompt's raw JSON, without a tokenizer, and cheaply. A conversation sends all
of its earlier turns again, so the JSON of its next turn begins with that of its last one.
"""

import zlib

FULL_BYTES = 4 << 10
"""Up to here every byte counts, beyond it only what is right before a boundary: prompts that differ somewhere rarely
agree again at the same places, and the price of being wrong is a prompt that is computed again."""

SAMPLE_BYTES = 512
STEP_BYTES = 1 << 10
GROWTH = 1.25
LONGEST_BYTES = 256 << 10


def _boundaries() -> tuple[tuple[int, int], ...]:
    """From where to where each key reads: every `STEP_BYTES` at first, then at distances that grow with the prompt."""
    ends = list(range(STEP_BYTES, FULL_BYTES + 1, STEP_BYTES))
    while ends[-1] * GROWTH <= LONGEST_BYTES:
        ends.append(int(ends[-1] * GROWTH))
    return tuple((end - STEP_BYTES if end <= FULL_BYTES else end - SAMPLE_BYTES, end) for end in ends)


BOUNDARIES = _boundaries()


def prefix_keys(model: str, prompt: bytes | memoryview, salt: str | None = None) -> list[int]:
    """Keys of the prompt's beginnings, the shortest first; none for a prompt that is shorter than `STEP_BYTES`.

    `salt`: what the engine's cache is salted with; prompts with different salts share nothing there.
    Checksums, not digests: who forges one only chooses an instance for a request of its own, which load decides too.
    The same on every replica of the gateway.
    """
    size = len(prompt)
    if size < STEP_BYTES:
        return []
    view = memoryview(prompt)
    crc32 = zlib.crc32
    key = crc32(model.encode())
    if salt is not None:
        key = crc32(salt.encode(), key)
    keys: list[int] = []
    for start, end in BOUNDARIES:
        if end > size:
            break
        key = crc32(view[start:end], key)
        keys.append(key)
    return keys
