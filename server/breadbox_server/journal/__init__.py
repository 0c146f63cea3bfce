"""What the core decided, made durable: a journal of turns, and snapshots that bound its length.

A *turn* is what the core decided between two commits: one record, with a sequence number that is
one more than the last. A *snapshot* of sequence n is the core's state after turn n; with the turns
after n it rebuilds the core. `storage` says what a place for both must do, `sqlite` and
`redis_stream` are two such places, `codec` is the one that knows how turns and snapshots are
written, `durable_core` runs the core behind them, `recovery` reads them back, `compactor` makes new
snapshots in a process of its own.
"""
