"""The decision core: pure, thread-safe, no event loop. See `fairshare` for the public names."""
