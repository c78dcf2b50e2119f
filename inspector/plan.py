"""A plan: which rows of which request run, and what each layer of it may read and write. Integers only, no torch."""

from dataclasses import dataclass, field

from replayscope.inspector.geometry import Geometry


@dataclass(frozen=True)
class Request:
    """One arm at one cut. All positions are absolute; per-layer tuples have one number per layer.

    start, stop: rows [start, stop) are fed. prompt_end: rows from there on are forced decode steps.
    window: W as this request applies it. floor[l]: lowest window key that layer l may see.
    first_row[l]: first row that runs in full; first_window[l]: first row that writes window KV;
    first_entry[l]: first entry that writes global KV (used at kv sources).
    floor_steps: (row, floor per layer): rows from there on have these floors instead, as later chunks of a prefill do.
    prefix: name of the request whose global entries below cut // ratio are read. window_owner: name of the request
    whose window slots lie below ``start``. private_prefix: the prefix is copied first, since the arm writes into it.
    frozen: top-k and experts are taken from the plan's first request, so that only smooth error is left.
    chunk: rows per block of its own; None lets the executor pack the request with others.
    tokens: "prompt", or "foreign" for the other prompt that a stale window comes from.
    """

    arm: str
    start: int
    stop: int
    prompt_end: int
    window: int
    floor: tuple[int, ...]
    first_row: tuple[int, ...]
    first_window: tuple[int, ...]
    first_entry: tuple[int, ...]
    floor_steps: tuple[tuple[int, tuple[int, ...]], ...] = ()
    cut: int | None = None
    replay: int | None = None
    prefix: str | None = None
    window_owner: str | None = None
    private_prefix: bool = False
    frozen: bool = False
    chunk: int | None = None
    tokens: str = "prompt"
    semantics: str = "paper"

    @property
    def name(self) -> str:
        at = "" if self.cut is None else f"@{self.cut}/{self.replay}"
        return f"{self.arm}{at}" if self.semantics == "paper" else f"{self.arm}{at}[{self.semantics}]"

    @property
    def replayed(self) -> int:
        """Rows below the cut that are computed again; none where no hit is used."""
        return max(0, (self.cut or 0) - self.start) if self.prefix else 0

    @property
    def cached(self) -> int:
        """Prefix tokens whose global KV is taken as it is."""
        return self.cut or 0 if self.prefix else 0

    @property
    def fresh(self) -> int:
        """Rows computed for the first time."""
        return self.stop - self.start - self.replayed

    def kept_entries(self, ratio: int) -> int:
        """Entries of the prefix that lie wholly below the cut."""
        return (self.cut or 0) // ratio if self.prefix and ratio else 0

    def floors(self, layer: int) -> list[tuple[int, int]]:
        """(first row, floor) of each stretch of rows, in order; the first starts at ``start``."""
        return [(self.start, self.floor[layer]), *((row, floors[layer]) for row, floors in self.floor_steps)]

    def projected(self, layer: int) -> int:
        """First row whose input of ``layer`` exists: the first that ran in full in the layer before."""
        return self.first_row[layer - 1] if layer else self.start

    def check(self, config: Geometry) -> None:
        """Raise ValueError if a layer could read what nobody wrote. Arms broken on purpose name an owner for it."""
        if not 0 <= self.start < self.stop:
            raise ValueError(f"{self.name}: no rows in [{self.start}, {self.stop})")
        for l in config.layers:
            if self.first_row[l] < self.projected(l):
                raise ValueError(f"{self.name}: layer {l} runs row {self.first_row[l]} that layer {l - 1} did not")
            if self.first_window[l] < self.projected(l) or self.first_window[l] > self.first_row[l]:
                raise ValueError(f"{self.name}: layer {l} cannot write window KV from row {self.first_window[l]}")
            owned = self.window_owner is not None and self.first_window[l] == self.start
            for row, floor in self.floors(l):
                reach = max(floor, max(row, self.first_row[l]) - self.window + 1, 0)
                if reach < self.first_window[l] and not owned:
                    raise ValueError(
                        f"{self.name}: layer {l} may see window key {reach}, written from {self.first_window[l]} on"
                    )


@dataclass(frozen=True)
class Plan:
    """Requests in the order in which they run; a request comes after those that it reads from."""

    requests: tuple[Request, ...]
    index: dict[str, int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        index: dict[str, int] = {}
        for i, r in enumerate(self.requests):
            for needed in (r.prefix, r.window_owner):
                if needed is not None and needed not in index:
                    raise ValueError(f"{r.name} reads from {needed}, which does not run before it")
            if r.name in index:
                raise ValueError(f"{r.name} is planned twice")
            index[r.name] = i
        object.__setattr__(self, "index", index)

    def owner(self, name: str | None) -> int:
        """Index of the request called ``name``, -1 for None."""
        return -1 if name is None else self.index[name]
