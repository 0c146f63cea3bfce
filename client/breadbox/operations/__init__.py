"""What a client does, as generators of effects: no I/O, no clock, no threads.

Callers: the clients, run by an interpreter of `transport`.
"""
