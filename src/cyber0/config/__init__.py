"""Settings: what can be set, what a value may be, and what can be named."""
