"""Carry out effects on an event loop, for the asyncio client."""
