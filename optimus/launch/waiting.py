"""What an agent says while it waits: a launch that stands still tells why."""

import time
from collections.abc import Callable


class Waiting:
    """Says what is waited for: at once, when it changes, and again every `every` seconds; after an hour, every minute."""

    def __init__(
        self, say: Callable[[str], None], *, every: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._every, self._clock = say, every, clock
        self._what: str | None = None  # nothing is waited for
        self._since = self._said = 0.0

    def on(self, what: str) -> None:
        """`what` is waited for; to be called often."""
        now = self._clock()
        if self._what is None:
            self._since = now
        waited = now - self._since
        if what != self._what:
            self._say(f"waits for {what}")
        elif now - self._said >= max(self._every, waited / 60):
            self._say(f"has waited {waited:.0f} s for {what}")
        else:
            return
        self._what, self._said = what, now

    def over(self) -> None:
        """Nothing is waited for any more."""
        self._what = None
