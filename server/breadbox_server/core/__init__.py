"""The replay buffer as a synchronous, deterministic state machine; entry: `buffers`.

No I/O, clock or event loop: time and randomness are arguments, effects are events that the driver
takes. ARCHITECTURE.md lists the rules B1 to B31.
"""
