"""A trace in memory for tests of what judges traces: synthetic tables that a test may change cell by cell."""

from copy import deepcopy
from functools import cache

from replayscope.inspector.verdict import Bug, all_bugs
from replayscope.traces import RunInfo, Table, TraceReader
from replayscope.traces.schema import bucket_names
from tests import synthetic
from tests.folding import fold
from tests.synthetic import Plant

CUT, START, TOKENS, WINDOW, LAYERS = 24, 16, 48, 8, 4


class Edited:
    """A trace in memory whose tables, runs and provenance a test may change."""

    def __init__(self, runs: list[RunInfo], tables: dict[tuple[str, str], Table], dtype: str, audit: bool):
        self.complete, self.runs, self.tables, self.config = True, runs, tables, {}
        self.provenance = synthetic.provenance(dtype, audit, 0)

    @classmethod
    def of(cls, trace: TraceReader) -> "Edited":
        tables = {(r, p): trace.table(r, p) for r in trace.references() for p in trace.points(r)}
        return cls(trace.runs, tables, trace.provenance["dtype"], trace.provenance["audit"])

    def references(self) -> list[str]:
        return list(dict.fromkeys(reference for reference, _ in self.tables))

    def points(self, reference: str) -> list[str]:
        return [point for r, point in self.tables if r == reference]

    def table(self, reference: str, point: str) -> Table:
        return self.tables[reference, point]

    def run(self, arm: str) -> int:
        return next(run.index for run in self.runs if run.arm == arm)

    def change(self, index: int, **fields) -> None:
        self.runs[index] = type(self.runs[index])(**(self.runs[index].to_json() | fields))

    def flip(self, reference: str, choice: str, arm: str, layer: int) -> None:
        """One row changed its choice within the floor."""
        table = self.tables[reference, choice]
        for name in ("changed", "flips"):
            table.arrays[name][self.run(arm), layer] = 1

    def no_flips(self) -> "Edited":
        for (_, point), table in self.tables.items():
            if point in ("topk", "router"):
                table.arrays["flips"][:] = 0
                table.arrays["changed"][:] = 0
        return self

    def scale(self, reference: str, point: str, arm: str, factor: float) -> None:
        """Every error of a run at one point, larger."""
        arrays, run = self.tables[reference, point].arrays, self.run(arm)
        arrays["diff2"][run] *= factor**2
        arrays["rel_max"][run] *= factor


@cache
def _recorded() -> "Edited":
    return record()


def clean_trace() -> "Edited":
    """A trace without a fault that may be edited."""
    return deepcopy(_recorded())


def bugs_of(trace: "Edited", arm: str) -> list[Bug]:
    return [bug for bug in all_bugs(trace) if bug.arm == arm]


def record(*plants: Plant, cuts: tuple[int, ...] = (CUT,), dtype: str = "float64", audit: bool = False) -> Edited:
    """The tables of a synthetic trace in which nothing flipped."""
    runs = synthetic.make_runs(TOKENS, WINDOW, LAYERS, cuts)
    buckets = bucket_names(TOKENS)
    ratios = synthetic.config(TOKENS, WINDOW, LAYERS)["ratios"]
    made = synthetic.divergence(runs, ratios, plants, dtype, 0)
    tables = {(reference, point): fold(packed, runs, point, buckets) for reference, point, packed in made}
    return Edited(runs, tables, dtype, audit).no_flips()
