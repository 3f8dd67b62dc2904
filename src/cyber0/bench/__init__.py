"""How fast this machine is: the figures of `cyber0 bench`, and the timing that the scripts in benchmarks/ share."""
