"""The core's values: inputs, entries, events, errors, limits and identifiers. No decisions.

Callers: any room.
"""
