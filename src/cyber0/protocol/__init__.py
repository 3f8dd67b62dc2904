"""Messages, federator and client of a round. No I/O."""
