from concurrent.futures import FIRST_COMPLETED, wait


class ActorPool:
    """Gives each free actor the next value; results come as they are there."""

    def __init__(self, actors):
        self._idle = list(actors)
        self._waiting = []
        self._running = {}

    def submit(self, function, value):
        if not self._idle:
            self._waiting.append((function, value))
            return
        actor = self._idle.pop()
        self._running[function(actor, value).future] = actor

    def get_next_unordered(self):
        future = next(iter(wait(list(self._running), return_when=FIRST_COMPLETED).done))
        self._idle.append(self._running.pop(future))
        if self._waiting:
            self.submit(*self._waiting.pop(0))
        return future.result()
