"""The commands of the light client, one module each.

Callers: `cli/main.py`, by name.
"""
