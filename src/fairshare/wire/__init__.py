"""Everything that is OpenAI, Anthropic or HTTP shaped, as pure functions and small state machines: no I/O, no clock."""
