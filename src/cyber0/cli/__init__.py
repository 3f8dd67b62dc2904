"""The command `cyber0`: what a person types, and what the screen shows."""
