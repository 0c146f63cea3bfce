"""How effects are carried out on an event loop.

Callers: the asyncio client.
"""
