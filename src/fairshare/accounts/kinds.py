"""Words and bounds that several parts of the accounts share."""

from enum import StrEnum

KEY_ID_DIGITS = 12
"""A key is called by so many hex digits of its first SHA-256."""

LONGEST_NAME = 64
LARGEST_LIMIT = 10**12


def is_model_name(name: str) -> bool:
    """Whether a model may be called so."""
    return 0 < len(name) <= 256 and name.isprintable()


class LimitKind(StrEnum):
    """What a limit bounds."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    """Prompt and completion tokens."""
    IN_FLIGHT = "in_flight"
    """Requests between their arrival and their end, waiting ones among them."""
