"""How far a matrix is: its progress and the time left, in rows, since a prompt may cost several times another.

No torch.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping

log = logging.getLogger(__name__)
# Seconds between two lines.
_EVERY = 10.0


class Pace:
    """A line on stderr every ten seconds. rows: what a prompt of each group costs; samples: how many it has; done: the
    prompts, as (group, seed), that an earlier run left, which count as done but not for the pace."""

    def __init__(
        self,
        rows: Mapping[str, int],
        samples: Mapping[str, int],
        done: Collection[tuple[str, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rows, self.prompts = rows, sum(samples.values())
        self.total = sum(samples[group] * each for group, each in rows.items())
        self.ran, self.there, self.before = 0, len(done), sum(rows[group] for group, _ in done)
        self.clock, self.began = clock, clock()
        self.said = self.began

    def add(self, group: str, prompts: int) -> None:
        """Say that so many prompts of a group have run."""
        self.ran += prompts * self.rows[group]
        self.there += prompts
        now = self.clock()
        if self.ran and now - self.said >= _EVERY:
            self.said = now
            done = self.before + self.ran
            left = (now - self.began) / self.ran * (self.total - done)
            percent = 100 * done // self.total
            log.info("%d/100, %d of %d prompts, about %.0f s left: %s", percent, self.there, self.prompts, left, group)
