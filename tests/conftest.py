"""Settings of all tests: what hypothesis tries is the same in every run, and never limited by time."""

from hypothesis import settings

settings.register_profile("cyber0", derandomize=True, deadline=None)
settings.load_profile("cyber0")
