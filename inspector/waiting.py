"""How torch's threads wait for the next operation: briefly awake, then asleep."""

from collections.abc import Mapping

# Turns of the loop in which a thread of libgomp waits before it sleeps: some microseconds. What wakes a thread takes
# longer than a small operation, and one that never sleeps takes the time of whoever works beside it.
TURNS = "1000"


def asleep_soon(environ: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment before torch is imported: nothing where it says itself how threads wait."""
    told = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environ.keys()
    return {} if told else {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": TURNS}
