"""Breadbox over a Redis of its own, as several machines have it."""

from bench.peers.breadbox import Breadbox
from bench.peers.side import main
from bench.processes import redis_server

if __name__ == "__main__":
    main(Breadbox("unix", redis_server))
