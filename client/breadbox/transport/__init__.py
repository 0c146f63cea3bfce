"""How effects are carried out by threads: interpreter, background work.

Callers: the blocking client. `transport.aio` is the same for asyncio.
"""
