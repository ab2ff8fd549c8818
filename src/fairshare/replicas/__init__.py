"""Replicas: one owner per pool decides for all of them, by a lease; the others ask it over the peer link."""
