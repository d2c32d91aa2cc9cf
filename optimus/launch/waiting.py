"""Progress messages of a waiting agent."""

import time
from collections.abc import Callable


class Waiting:
    """Reports what an agent waits for: at every change, then every `every` seconds, and less often in long waits."""

    def __init__(
        self, say: Callable[[str], None], *, every: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._every, self._clock = say, every, clock
        self._what: str | None = None  # None: the agent does not wait
        self._since = self._said = 0.0

    def on(self, what: str) -> None:
        """Reports a wait for `what`. The agent must call this method often during the wait."""
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
        """Ends the wait."""
        self._what = None
