"""From (config, N, H, R) to requests: what each arm runs. Pure functions on integers.

``paper`` is the rule of the technical report (arXiv 2609.19969, section 3.2.2): an encoder replay feeds rows from
max(0, H-W) to H and the suffix in one causal pass, no window key below its start is seen, and no cached global entry
is written.
"""

from dataclasses import dataclass, replace

from replayscope.inspector.errors import UsageError
from replayscope.inspector.plan import Request
from replayscope.model.config import ModelConfig

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
SEMANTICS = {
    "paper": "technical report: every cut H is admitted, s = max(0, H-R), decoder tail cut at the source layer"
}
NOISE = ("repeat", "rechunk", "hit")


@dataclass(frozen=True)
class Shape:
    """What every arm of one sweep shares: N tokens, of which the last ``forced`` are decode steps."""

    config: ModelConfig
    tokens: int
    forced: int = 0

    @property
    def prompt_end(self) -> int:
        return self.tokens - self.forced


def admits(semantics: str, cut: int) -> bool:
    """Whether the semantics can take a prefix hit of that length."""
    if semantics not in SEMANTICS:
        raise UsageError(f"unknown semantics {semantics!r}; valid: {', '.join(SEMANTICS)}")
    return cut >= 0


def exact_replay(config: ModelConfig) -> int:
    """Replay length after which the last W window rows and the last output row are exact: layers·(W-1)+1."""
    return config.num_hidden_layers * (config.sliding_window - 1) + 1


def floor_layers(config: ModelConfig) -> list[int]:
    """The layers L of ``broken:floor@L`` that ``broken:*`` runs: the first, one in the middle and the last."""
    return sorted({0, config.num_hidden_layers // 2, config.num_hidden_layers - 1})


def valid_arms(config: ModelConfig) -> list[str]:
    """Every arm name that can be asked for (floor@L for each layer L)."""
    kinds = [k for k in BROKEN if k != "floor@L"] + [f"floor@{l}" for l in config.layers]
    return [*ARMS, *(f"oracle:{a}" for a in ARMS if a not in ("repeat", "rechunk")), *(f"broken:{k}" for k in kinds)]


def has_cut(arm: str) -> bool:
    """Whether the arm depends on the cut (the others run once per trace)."""
    return arm.removeprefix("oracle:") not in ("full", "repeat", "rechunk", "decoder")


def oracle_of(arm: str) -> str:
    """The arm whose oracle judges ``arm``: broken arms are judged as the encoder, noise runs as full."""
    if arm.startswith("broken:"):
        return "encoder"
    return "full" if arm in ("full", *NOISE) else arm


def request(
    shape: Shape, arm: str, cut: int | None = None, replay: int | None = None, suffix: int | None = None
) -> Request:
    """The request of one arm. Raises UsageError for a cut or arm that cannot run.

    cut: H, for arms that have one. replay: R, default W. suffix: rows run from H on, default all.
    """
    c, N, W = shape.config, shape.tokens, shape.config.sliding_window
    kind = arm.removeprefix("broken:") if arm.startswith("broken:") else None
    if (kind is None and arm not in ARMS) or (kind is not None and f"broken:{kind}" not in valid_arms(c)):
        raise UsageError(f"unknown arm {arm!r}; valid: {', '.join(valid_arms(c))}")
    if not has_cut(arm):
        whole = _rows(c, arm, 0, N, shape.prompt_end, 0)
        if arm == "rechunk":
            return replace(whole, chunk=N // 3 + 1)
        return _decoder_tail(c, whole) if arm == "decoder" else replace(whole, chunk=N)
    if cut is None or not 0 <= cut < N:
        raise UsageError(f"cut {cut} is outside 0 … {N - 1}: the last token must be computed")
    R = exact_replay(c) if arm == "exact" else W if replay is None else replay
    if R < 1:
        raise UsageError(f"replay length {R} is below 1")
    stop = N if suffix is None else min(N, cut + suffix)
    end = min(stop, shape.prompt_end)
    s = max(0, cut - R)
    if arm == "hit":
        kept = _rows(c, arm, cut, stop, end, 0, cut)
        return replace(kept, window_owner="full" if cut else None)
    if kind is not None:
        return _broken(c, kind, cut, R, s, stop, end)
    enc = _rows(c, arm, s, stop, end, s, cut, R)
    return _decoder_tail(c, enc) if arm == "both" else enc


def _rows(
    c: ModelConfig,
    arm: str,
    start: int,
    stop: int,
    end: int,
    floor: int,
    cut: int | None = None,
    replay: int | None = None,
) -> Request:
    """Rows [start, stop) through every layer, with one floor; entries from the cut on are written."""
    every = (start,) * c.num_hidden_layers
    entries = tuple((cut or 0) // r if r else 0 for r in c.compress_ratios)
    return Request(
        arm=arm,
        start=start,
        stop=stop,
        prompt_end=end,
        window=c.sliding_window,
        floor=(floor,) * c.num_hidden_layers,
        first_row=every,
        first_window=every,
        first_entry=entries,
        cut=cut,
        replay=replay,
        prefix="full" if cut else None,
    )


def _decoder_tail(c: ModelConfig, r: Request) -> Request:
    """From the decoder's source layer on, only the prompt's last W rows (and what follows) run and are seen."""
    t = max(r.start, r.prompt_end - c.sliding_window)
    D = c.decoder_start

    def tail(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(max(v, t) if l >= D else v for l, v in enumerate(values))

    return replace(r, floor=tail(r.floor), first_row=tail(r.first_row), first_window=tail(r.first_window))


def _broken(c: ModelConfig, kind: str, cut: int, R: int, s: int, stop: int, end: int) -> Request:
    """A fault planted in ``encoder``. Where it would change nothing it is refused, so that no test passes vacuously."""
    arm = f"broken:{kind}"
    right = _rows(c, arm, s, stop, end, s, cut, R)
    if kind == "start+1":
        if s + 1 >= max(cut, 1):
            raise UsageError(f"{arm} at cut {cut}: nothing is left to replay")
        return _rows(c, arm, s + 1, stop, end, s + 1, cut, R)
    if kind == "window+1":
        if stop - s <= c.sliding_window:
            raise UsageError(f"{arm} at cut {cut}: fewer than W+1 rows run, so the window never fills")
        return replace(right, window=c.sliding_window + 1)
    if s == 0:
        raise UsageError(f"{arm} changes nothing at cut {cut} with replay {R}: the replay starts at 0")
    if kind == "start-1":
        return _rows(c, arm, s - 1, stop, end, s - 1, cut, R)
    if kind == "overwrite":
        entries = tuple(-(-s // r) if r else 0 for r in c.compress_ratios)
        return replace(right, first_entry=entries, private_prefix=True)
    if kind == "stale":
        return replace(right, floor=(0,) * c.num_hidden_layers, window_owner="foreign")
    layer = int(kind.removeprefix("floor@"))
    return replace(right, floor=tuple(0 if l >= layer else s for l in c.layers), window_owner="full")
