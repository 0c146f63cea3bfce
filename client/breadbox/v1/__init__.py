"""Stubs of the wire contract; see protos/."""
