"""From (config, N, H, R, chunks) to requests: what each arm runs under whose rules. Pure functions on integers.

An encoder replay feeds rows from max(0, H-R) to H and the suffix in one causal pass; no window key below its start is
seen, and no cached global entry is written. ``engines`` says in what the implementations differ.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from replayscope.inspector.engines import (
    ENGINES,
    Chunks,
    chunk_ends,
    decoder_tail,
    engine,
    granularity,
    replay_start,
)
from replayscope.inspector.errors import UsageError
from replayscope.inspector.geometry import Geometry, window_layers
from replayscope.inspector.plan import Request

ARMS = {
    "full": "cold prefill of everything: the reference",
    "repeat": "full once more, in the same blocks",
    "rechunk": "full once more, in other blocks",
    "hit": "global and window state kept up to H, only the suffix computed",
    "encoder": "global KV kept, window KV rebuilt by replaying [s, H), then the suffix",
    "exact": "encoder with R = layers·(W-1)+1: equals full in the window and from row H-1 on",
    "decoder": "the decoder half runs on the prompt's last W rows only",
    "both": "encoder and decoder replay together",
}
BROKEN = {
    "start+1": "replay starts one row late",
    "start-1": "replay starts one row early",
    "window+1": "the window holds W+1 keys",
    "stale": "no floor, and the slots below s hold another prompt's window",
    "overwrite": "replayed rows write their global entries over the cached ones",
    "floor@L": "from layer L on the floor is ignored and the slots below s hold full's window",
}
# Arms that also run with top-k and experts taken from full, as frozen:ARM: what is left of their divergence is smooth.
FREEZABLE = ("hit", "encoder", "exact", "decoder", "both")
SEMANTICS = {name: rules.about for name, rules in ENGINES.items()}
NOISE = ("repeat", "rechunk", "hit")


@dataclass(frozen=True)
class Shape:
    """What every arm of one sweep shares: N tokens, of which the last ``forced`` are decode steps.

    chunks: how the prompt is prefilled, in rows per chunk or as the chunks' ends; None for one chunk. block: block or
    page size of the cache where the semantics have one; None for each one's default.
    """

    config: Geometry
    tokens: int
    forced: int = 0
    chunks: Chunks = None
    block: int | None = None

    @property
    def prompt_end(self) -> int:
        return self.tokens - self.forced


def admits(semantics: str, cut: int, block: int | None = None) -> bool:
    """Whether the semantics can take a prefix hit of that length, with that block or page size."""
    return cut >= 0 and cut % granularity(semantics, block) == 0


def exact_replay(config: Geometry) -> int:
    """Replay length after which the last W window rows and the last output row are exact: layers·(W-1)+1, of those
    layers that have window KV of their own."""
    return len(window_layers(config)) * (config.sliding_window - 1) + 1


def floor_layers(config: Geometry) -> list[int]:
    """The L of ``broken:floor@L`` that ``broken:*`` runs: of layers with a window the first, a middle one, the last."""
    windows = [l for l in config.layers if config.window_source(l) is not None]
    return sorted({windows[0], windows[len(windows) // 2], windows[-1]})


def arm_names(floors: Iterable[int | str] = ("L",)) -> list[str]:
    """Every arm name that can be asked for; ``floors``: the layers L of ``broken:floor@L``, by default the letter."""
    kinds = [k for k in BROKEN if k != "floor@L"] + [f"floor@{l}" for l in floors]
    frozen = [f"frozen:{a}" for a in FREEZABLE]
    oracles = [f"oracle:{a}" for a in (*ARMS, *frozen) if a not in ("repeat", "rechunk")]
    return [*ARMS, *frozen, *oracles, *(f"broken:{k}" for k in kinds)]


def valid_arms(config: Geometry) -> list[str]:
    """arm_names with ``floor@L`` for each layer of the model."""
    return arm_names(config.layers)


def unsuited(config: Geometry, arm: str) -> str:
    """Why a model of this config has no such arm, or nothing where it has."""
    if plain(arm) in ("decoder", "both") and config.decoder_start >= config.num_hidden_layers:
        return "it has no decoder half, whose layers all read one layer's global KV"
    if arm.removeprefix("oracle:").startswith("frozen:") and not config.freezes:
        return "it makes no choice that could be frozen"
    return "it has no global KV" if arm == "broken:overwrite" and not any(config.compress_ratios) else ""


def plain(arm: str) -> str:
    """The arm without oracle: and frozen: in front."""
    return arm.removeprefix("oracle:").removeprefix("frozen:")


def has_cut(arm: str) -> bool:
    """Whether the arm depends on the cut (the others run once per trace)."""
    return plain(arm) not in ("full", "repeat", "rechunk", "decoder")


def semantics_of(arm: str, semantics: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the given semantics that the arm runs under: ``full`` and the noise runs know none, and run once."""
    return ("paper",) if arm in ("full", *NOISE) else semantics


def oracle_of(arm: str) -> str:
    """The arm whose oracle judges ``arm``: broken arms are judged as the encoder, noise runs as full."""
    if arm.startswith("broken:"):
        return "encoder"
    return "full" if arm in ("full", *NOISE) else arm


def request(
    shape: Shape,
    arm: str,
    cut: int | None = None,
    replay: int | None = None,
    suffix: int | None = None,
    semantics: str = "paper",
) -> Request:
    """The request of one arm. Raises UsageError for a cut, chunks or an arm that cannot run.

    cut: H, for arms that have one. replay: R, default W. suffix: rows run from H on, default all.
    """
    c, N, W = shape.config, shape.tokens, shape.config.sliding_window
    if reason := unsuited(c, arm):
        raise UsageError(f"{arm} is no arm of this model: {reason}")
    if arm.startswith("frozen:") and plain(arm) in FREEZABLE:
        return replace(request(shape, plain(arm), cut, replay, suffix, semantics), arm=arm, frozen=True)
    kind = arm.removeprefix("broken:") if arm.startswith("broken:") else None
    if (kind is None and arm not in ARMS) or (kind is not None and f"broken:{kind}" not in valid_arms(c)):
        raise UsageError(f"unknown arm {arm!r}; valid: {', '.join(valid_arms(c))}")
    (semantics,) = semantics_of(arm, (semantics,))
    if not has_cut(arm):
        whole = replace(_rows(c, arm, 0, N, shape.prompt_end, 0), semantics=semantics)
        if arm == "rechunk":
            return replace(whole, chunk=N // 3 + 1)
        return _decoder_tail(shape, whole) if arm == "decoder" else replace(whole, chunk=N)
    if cut is None or not 0 <= cut < N:
        raise UsageError(f"cut {cut} is outside 0 … {N - 1}: the last token must be computed")
    R = exact_replay(c) if arm == "exact" else W if replay is None else replay
    if R < 1:
        raise UsageError(f"replay length {R} is below 1")
    if not admits(semantics, cut, shape.block):
        raise UsageError(
            f"cut {cut} is not admitted by {semantics}: no multiple of {granularity(semantics, shape.block)}"
        )
    stop = N if suffix is None else min(N, cut + suffix)
    end = min(stop, shape.prompt_end)
    if arm == "hit":
        kept = _rows(c, arm, cut, stop, end, 0, cut)
        return replace(kept, window_owner="full" if cut else None)
    s, used = replay_start(semantics, cut, R)
    right = replace(_rows(c, arm, s, stop, end, s, cut, R, used), semantics=semantics)
    if kind is not None:
        return _broken(c, kind, right)
    ends = _ends(shape, right)
    return _decoder_tail(shape, right, ends) if arm == "both" else right


def _rows(
    c: Geometry,
    arm: str,
    start: int,
    stop: int,
    end: int,
    floor: int,
    cut: int | None = None,
    replay: int | None = None,
    used: int | None = None,
) -> Request:
    """Rows [start, stop) through every layer, with one floor; entries from the cut on are written.

    used: tokens of the hit whose global KV is read, if not all of it.
    """
    every = (start,) * c.num_hidden_layers
    used = (cut or 0) if used is None else used
    return Request(
        arm=arm,
        start=start,
        stop=stop,
        prompt_end=end,
        window=c.sliding_window,
        floor=(floor,) * c.num_hidden_layers,
        first_row=every,
        first_window=every,
        first_entry=tuple(used // r if r else 0 for r in c.compress_ratios),
        cut=cut,
        replay=replay,
        prefix="full" if used else None,
    )


def _ends(shape: Shape, r: Request) -> tuple[int, ...]:
    """Ends of the chunks in which the request's prompt is prefilled."""
    window, used = shape.config.sliding_window, r.cached
    return chunk_ends(r.semantics, shape.chunks, r.start, used, r.prompt_end, window, shape.block)


def _decoder_tail(shape: Shape, r: Request, ends: tuple[int, ...] | None = None) -> Request:
    """The decoder half of the request runs, writes and sees only the tail that its semantics keep."""
    c, source = shape.config, engine(r.semantics).source
    tail = decoder_tail(r.semantics, r.start, ends or _ends(shape, r), c.sliding_window)
    narrow = c.decoder_start + (source != "nothing")
    run = c.decoder_start + (source == "rows")

    def late(values: tuple[int, ...], value: int, first: int = narrow) -> tuple[int, ...]:
        return tuple(max(v, value) if l >= first else v for l, v in enumerate(values))

    return replace(
        r,
        floor=late(r.floor, tail.floor),
        first_row=late(r.first_row, tail.row, run),
        first_window=late(r.first_window, tail.row),
        floor_steps=tuple((row, late(r.floor, floor)) for row, floor in tail.steps),
    )


def _broken(c: Geometry, kind: str, right: Request) -> Request:
    """A fault planted in ``encoder``. Where it would change nothing it is refused, so that no test passes vacuously."""
    arm, cut, s, W = right.arm, right.cut or 0, right.start, c.sliding_window
    if cut and not right.prefix:
        raise UsageError(
            f"{arm} at cut {cut}: {right.semantics} drops a hit of at most {right.replay}, none is replayed"
        )

    def moved(start: int) -> Request:
        every = (start,) * c.num_hidden_layers
        return replace(right, start=start, floor=every, first_row=every, first_window=every)

    if kind == "start+1":
        if s + 1 >= max(cut, 1):
            raise UsageError(f"{arm} at cut {cut}: nothing is left to replay")
        return moved(s + 1)
    if kind == "window+1":
        if right.stop - s <= W:
            raise UsageError(f"{arm} at cut {cut}: fewer than W+1 rows run, so the window never fills")
        return replace(right, window=W + 1)
    if s == 0:
        raise UsageError(f"{arm} changes nothing at cut {cut} with replay {right.replay}: the replay starts at 0")
    if kind == "start-1":
        return moved(s - 1)
    if kind == "overwrite":
        entries = tuple(-(-s // r) if r else 0 for r in c.compress_ratios)
        return replace(right, first_entry=entries, private_prefix=True)
    if kind == "stale":
        return replace(right, floor=(0,) * c.num_hidden_layers, window_owner="foreign")
    layer = int(kind.removeprefix("floor@"))
    if all(c.window_source(l) is None for l in c.layers if l >= layer):
        raise UsageError(f"{arm} changes nothing: no layer from {layer} on has a window")
    return replace(right, floor=tuple(0 if l >= layer else s for l in c.layers), window_owner="full")
