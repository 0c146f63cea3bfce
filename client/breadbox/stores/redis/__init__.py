"""Payloads in Redis, for clients and for the server, whose journal connects by it too."""
