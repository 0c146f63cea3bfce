"""Breadbox beside what one would take instead: Reverb, TransferQueue, a list in Redis, a socket."""
