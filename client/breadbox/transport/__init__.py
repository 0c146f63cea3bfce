"""Carry out effects in threads, for the blocking client; `transport.aio` for the asyncio client."""
