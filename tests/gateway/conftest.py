"""Every test here that asks for a store runs on both backends."""

from support.stores import address, backend, empty, run  # noqa: F401
