"""What the core decided, made durable: a journal of turns, and snapshots that bound its length.

A *turn* is what the core decided between two commits: one record, numbered without a gap. A
*snapshot* of sequence n is the core's state after turn n; with later turns it rebuilds the core.
"""
