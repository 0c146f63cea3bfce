"""Payload bytes through the server, for clients that must not see the store. For `rpc`."""
