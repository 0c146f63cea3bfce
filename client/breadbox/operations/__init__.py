"""A client's operations as generators of effects: no I/O, no clock, no threads."""
