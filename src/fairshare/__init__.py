"""fairshare decides the vLLM priority of every request, so that a shared GPU pool is a reservation with borrowing."""
