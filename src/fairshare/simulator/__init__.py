"""Try a plan before buying GPUs: loads, a gateway and engines in virtual time.

The gateway's decisions come from the same `fairshare.core` classes that the gateway runs, the engines are
`fairshare.engine.scheduler`. A run depends on its scenario and seed alone and gives the same numbers every time.
"""
