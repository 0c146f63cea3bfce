"""Payloads in Redis, for clients and for the server.

Callers: `stores`, and the server's journal for connections.
"""
