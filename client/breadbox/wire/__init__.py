"""Protobuf messages to values and back, statuses to errors, the choice of a server."""
