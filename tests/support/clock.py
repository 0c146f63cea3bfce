"""A clock that a test moves."""


class ManualClock:
    """Seconds that pass only when told. `sleep` moves the clock and remembers how far."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.slept_s: list[float] = []

    def __call__(self) -> float:
        return self.now

    def advance(self, duration_s: float) -> None:
        """Let time pass."""
        assert duration_s >= 0
        self.now += duration_s

    def sleep(self, duration_s: float) -> None:
        """Stand in for time.sleep."""
        self.slept_s.append(duration_s)
        self.advance(duration_s)
