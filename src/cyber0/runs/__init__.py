"""A run's folder: written, resumed, replayed, verified, exported."""
