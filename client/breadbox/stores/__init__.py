"""Payload stores: one protocol, several places."""
