"""Who may use what, how much of it, and what they used: pure rules, and calls to the store."""
