"""Drives the dispatch queues: events in, decisions carried out. One `PoolDriver` per gateway process."""
