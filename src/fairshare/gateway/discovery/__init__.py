"""Elastic fleets: instances from DNS, a watched file, Kubernetes and the admin API. `fleet` decides, the rest asks."""
