"""Slopes of a loss along directions, by the fastest way that a model allows."""
