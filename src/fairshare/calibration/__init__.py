"""Measures a real engine: the concurrency it sustains, and what a token costs there."""
