"""Payloads by way of the server.

Callers: `operations`.
"""
