"""A whole federation in one process: data, clients, Byzantine clients, federator, methods."""
