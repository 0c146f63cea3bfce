"""The replay buffer as a synchronous, deterministic state machine.

Nothing in here does I/O, reads a clock or knows of an event loop: time and randomness are
arguments, and what should happen outside is told in events. `breadbox_server.core.buffers` is the
only entry. The rules B1 to B15 that comments and tests cite are listed in ARCHITECTURE.md.
"""
