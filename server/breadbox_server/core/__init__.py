"""The replay buffer as a synchronous, deterministic state machine.

Nothing in here does I/O, reads a clock or knows an event loop: time and randomness are arguments,
and effects are events that the driver takes. `breadbox_server.core.buffers` is the only entry. The
rules that comments and tests cite (B1 to B31) are listed in ARCHITECTURE.md.
"""
