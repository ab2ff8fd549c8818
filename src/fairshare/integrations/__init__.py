"""The decision core inside other programs: LiteLLM's proxy, ASGI applications, your own gateway."""
