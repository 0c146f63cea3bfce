"""Stubs of what a journal holds; see protos/."""
