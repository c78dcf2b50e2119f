"""What a config costs to cache, to replay and to store: each figure with its formula and where it is from. No torch.

Formulas are arithmetic on numbers (· is ×, floor and ceil round), so that they can be typed into a calculator.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import groupby
from typing import Any

from replayscope.inspector.cache_sizes import Cache, Config, cache_of, load_config
from replayscope.inspector.engines import ENGINES, granularity, page_hit, replay_start
from replayscope.model.config import ModelConfig
from replayscope.model.shapes import FORMATS, PARTS, expected_shapes, part_of, stored

COMPARED = ("v41-flash", "v4-flash")
PAGES = (64, 256)


@dataclass(frozen=True)
class Figure:
    """One line of the ledger. `key` names it for machines; `source` starts with config, typed, published or assumed."""

    section: str
    key: str
    name: str
    value: int | Fraction
    unit: str
    formula: str
    source: str


@dataclass(frozen=True)
class Inputs:
    """What no config says. Lifetimes in hours and minutes, host memory in bytes, its share in percent.

    replay: lengths in tokens, none for W. persistent: how many times the persistent KV of V4-Flash is larger than that
    of V4.1-Flash (arXiv 2609.19969). `given` names the fields that were typed; the others carry their default's origin.
    """

    tokens: int = 1_000_000
    contexts: int = 8
    replay: tuple[int, ...] = ()
    persistent: int = 8
    global_hours: int = 72
    window_minutes: int = 5
    host_share: int = 10
    host_memory: int = 1 << 40
    given: frozenset[str] = frozenset()

    def source(self, field: str) -> str:
        """Where the value of a field is from."""
        if field in self.given:
            return "typed"
        assumed = {"window_minutes": 'assumed (published as "minutes")', "host_memory": "assumed"}
        return assumed.get(field, "published")


def exact_replay(layers: int, window: int) -> int:
    """Rows after which the last W rows of each of `layers` stacked window layers are exact: layers·(W-1) + 1.

    A row of a layer needs W-1 rows more of the layer below, and all W rows are wanted in the last (vLLM #57281).
    """
    return layers * (window - 1) + 1


def paged_replay(layers: int, window: int, page: int) -> int:
    """The looser length in whole pages that SGLang recomputes: W in pages, and a window per further layer (#31713)."""
    return math.ceil((math.ceil(window / page) * page + (layers - 1) * window) / page) * page


def ledger(config: Config, inputs: Inputs) -> list[Figure]:
    """All figures, section by section."""
    cache = cache_of(config)
    figures = [*_cache_figures(cache), *_memory_figures(cache, inputs), *_replay_figures(cache, inputs)]
    figures += _hit_figures(cache, inputs)
    if isinstance(config, ModelConfig):
        figures += weight_figures(config)
    # The factor was published for V4.1-Flash only; for another model it has to be typed.
    persistent = "persistent" in inputs.given or cache == cache_of(load_config("v41-flash"))
    return [*figures, *_input_figures(cache, inputs, persistent)]


def _cache_figures(cache: Cache) -> list[Figure]:
    out: list[Figure] = []

    def add(key: str, name: str, value: int | Fraction, formula: str, unit: str = "B") -> None:
        out.append(Figure("cache", key, name, value, unit, formula, cache.origin))

    W = cache.window
    if cache.main is not None and cache.index is not None:
        add("main", "global KV of an entry", cache.main.bytes, cache.main.formula)
        add("index", "index key of an entry", cache.index.bytes, cache.index.formula)
        for s in cache.sources:
            add(f"entry_{s.ratio}", f"entry of {s.ratio} token{'s' * (s.ratio > 1)}", s.entry.bytes, s.entry.formula)
    else:
        kinds = ("window", cache.layers), ("global", sum(s.layers for s in cache.sources)), ("shared", cache.shared)
        for kind, n in kinds:
            name = "layers that read another's KV" if kind == "shared" else f"{kind} layers with KV of their own"
            add(f"{kind}_layers", name, n, f"{n}", "layers")
        for i, s in enumerate(cache.sources):
            name = f"global KV of a token in each of {s.layers} layers"
            add(f"entry_1{f'_{i}' * (i > 0)}", name, s.entry.bytes, s.entry.formula)
    rates = _sum(f"{_times(s.layers, s.entry.bytes)}{f'/{s.ratio}' * (s.ratio > 1)}" for s in cache.sources)
    add("global_token", "global KV per token", cache.per_token, rates)
    for name in COMPARED:
        other = cache_of(load_config(name))
        if other.per_token != cache.per_token > 0:
            times, formula = cache.per_token / other.per_token, f"({rates})/{_number(other.per_token)}"
            # The less certain of the two origins is the ratio's.
            origin = cache.origin if "assumed" in cache.origin else other.origin
            out.append(Figure("cache", f"against_{name}", f"against {name}", times, "×", formula, origin))
    for i, w in enumerate(cache.windows):
        name = f"window KV of a token in {'a layer' if len(cache.windows) == 1 else f'each of {w.layers} layers'}"
        add(f"slot{f'_{i}' * (i > 0)}", name, w.slot.bytes, w.slot.formula)
    formula = _sum(f"{w.layers}·{W}·{w.slot.bytes}" for w in cache.windows)
    add("window_request", "window KV per request", cache.window_bytes, formula)
    if cache.encoder is not None:
        slot = cache.windows[0].slot.bytes
        for half, n in (("encoder", cache.encoder), ("decoder", cache.layers - cache.encoder)):
            add(f"window_{half}", f"of it the {half} half", n * W * slot, f"{n}·{W}·{slot}")
    if cache.main is None:
        return out
    states = _sum(_times(s.layers, s.state.formula) for s in cache.sources if s.state.bytes)
    add("open_request", "open entries per request", cache.open_bytes, states)
    return out


def _memory_figures(cache: Cache, inputs: Inputs) -> list[Figure]:
    T, C = inputs.tokens, inputs.contexts
    one, window, state = cache.global_bytes(T), cache.window_bytes, cache.open_bytes
    entries = _sum(
        f"{_times(s.layers, s.entry.bytes)}·{f'floor({T}/{s.ratio})' if s.ratio > 1 else T}" for s in cache.sources
    )
    kept = [
        ("global_contexts", "global KV of all contexts", one),
        ("window_contexts", "window KV of all contexts", window),
    ]
    if cache.main is not None:
        kept.append(("open_contexts", "open entries of all contexts", state))
    together = " + ".join(f"{C * size}" for _, _, size in kept)
    lines = [
        ("global_context", "global KV of one context", one, entries),
        *((key, name, C * size, f"{C}·{size}") for key, name, size in kept),
        ("memory", "together", C * sum(size for _, _, size in kept), together),
    ]
    section = f"memory of {T:,} tokens × {C:,} contexts"
    return [Figure(section, key, name, value, "B", formula, cache.origin) for key, name, value, formula in lines]


def _replay_figures(cache: Cache, inputs: Inputs) -> list[Figure]:
    out: list[Figure] = []
    T, C, W, L = inputs.tokens, inputs.contexts, cache.window, cache.layers

    def add(key: str, name: str, value: int | Fraction, formula: str, source: str, unit: str = "tokens") -> None:
        out.append(Figure("replay", key, name, value, unit, formula, source))

    source = "typed" if "replay" in inputs.given else "published (R = W)"
    for R in inputs.replay or (W,):
        rows = min(R, T)
        add(f"replayed_{R}", f"replayed with R = {R}", rows, f"min({R}, {T})", source)
        add(f"replayed_{R}_contexts", "by all contexts", C * rows, f"{C}·{rows}", source)
        add(f"replayed_{R}_share", "share of a cold prefill", Fraction(100 * rows, T), f"100·{rows}/{T}", source, "%")
        # R - l·(W-1) of the R rows enter layer l exact, and W must; a replay from the first token is a cold prefill.
        every = R >= T or W == 1
        exact = L if every else min(L, (R - 1) // (W - 1))
        formula = f"{L}" if every else f"min({L}, floor(({R} - 1)/({W} - 1)))"
        add(f"replayed_{R}_exact", "layers with an exact window", exact, formula, "config", "layers")
    # Who runs the source layer on the tail's rows only has one layer more to make exact.
    halves = []
    if cache.encoder is not None:
        E = cache.encoder
        halves = [
            ("encoder", "encoder", E, "config"),
            ("decoder", f"decoder from layer {E}", L - E, "config; paper, tokenspeed, sglang-0.5.23"),
            ("decoder_after", f"decoder after layer {E}", L - E - 1, "config; vllm-0.33, sglang-day0"),
        ]
    stacks = [stack for stack in (*halves, ("model", "whole model", L, "config")) if stack[2]]
    for key, name, n, origin in stacks:
        add(f"exact_{key}", f"exact: {name}", exact_replay(n, W), f"{n}·({W} - 1) + 1", origin)
    for key, name, n, _ in stacks:
        if key in ("encoder", "model"):
            add(f"windows_{key}", f"in windows: {name}", n * W, f"{n}·{W}", "config; paper's bound")
            for page in PAGES:
                formula = f"ceil((ceil({W}/{page})·{page} + ({n} - 1)·{W})/{page})·{page}"
                label = f"in pages of {page}: {name}"
                add(f"pages_{page}_{key}", label, paged_replay(n, W, page), formula, "config; sglang's rule")
    return out


def _hit_figures(cache: Cache, inputs: Inputs) -> list[Figure]:
    """What each implementation's rule runs of a context that is cached whole and asked again: H is the longest hit that
    it admits, rows max(0, H - R) … T run, all layers of them where nothing trims the decoder half."""
    out, T = [], inputs.tokens
    section = f"rows of {T:,} cached tokens that run again"
    for R in inputs.replay or (cache.window,):
        for name, rules in ENGINES.items():
            step = granularity(name)
            start, _ = replay_start(name, page_hit(T, step), R)
            label = f"{name}, R = {R}"
            formula = f"{T} - max(0, floor(({T} - 1)/{step})·{step} - {R})"
            source = f"config; {rules.sources['cuts']}"
            out.append(Figure(section, f"again_{name}_{R}", label, T - start, "rows", formula, source))
    return out


def weight_figures(config: ModelConfig) -> list[Figure]:
    """Parameters, and bytes of their tensors on disk, by part; vision and speculative decoding are not counted."""
    numbers = {part: dict.fromkeys(FORMATS, 0) for part in PARTS}
    scales = dict.fromkeys(PARTS, 0)
    looked_up = routed = 0
    for name, shape in expected_shapes(config).items():
        part, kept = part_of(name), stored(name, shape)
        numbers[part][kept.format] += kept.numbers
        scales[part] += kept.scales
        looked_up += kept.numbers if name.endswith("embed.weight") else 0
        routed += kept.numbers if ".ffn.experts." in name else 0
    parameters: list[Figure] = []
    disk: list[Figure] = []
    for part in PARTS:
        held = {fmt: count for fmt, count in numbers[part].items() if count}
        if not held:
            continue
        key, total = part.replace(" ", "_"), sum(held.values())
        formula = _sum(f"{count}" for count in held.values())
        parameters.append(Figure("weights", f"parameters_{key}", part, total, "parameters", formula, "config"))
        size = sum(int(count * FORMATS[fmt]) for fmt, count in held.items()) + scales[part]
        terms = [f"{n}/2" if fmt == "fp4" else _times(int(FORMATS[fmt]), n) for fmt, n in held.items()]
        formula = _sum([*terms, *[f"{scales[part]}"] * bool(scales[part])])
        # Nobody has published the stored type of the head, of the router and of the compressor.
        origin = "config; published formats" if part == "engram" else "config; published and assumed formats"
        disk.append(Figure("weights", f"bytes_{key}", f"{part} on disk", size, "B", formula, origin))
    total, size = sum(f.value for f in parameters), sum(f.value for f in disk)
    formula = _sum(f"{f.value}" for f in parameters)
    parameters.append(Figure("weights", "parameters", "all", total, "parameters", formula, "config"))
    formula = _sum(f"{f.value}" for f in disk)
    disk.append(Figure("weights", "bytes", "all on disk", size, "B", formula, "config; published and assumed formats"))
    used = routed * config.num_experts_per_tok // config.n_routed_experts
    formula = f"{total} - {looked_up} - {routed} + {routed}·{config.num_experts_per_tok}/{config.n_routed_experts}"
    active = total - looked_up - routed + used
    label = "multiplied for a token"
    return [*parameters, Figure("weights", "active", label, active, "parameters", formula, "config"), *disk]


def _input_figures(cache: Cache, inputs: Inputs, persistent: bool) -> list[Figure]:
    out: list[Figure] = []
    i, kept, windows = inputs, inputs.contexts * cache.global_bytes(inputs.tokens), inputs.contexts * cache.window_bytes

    def add(key: str, name: str, value: int | Fraction, unit: str, formula: str, field: str) -> None:
        out.append(Figure("in no config", key, name, value, unit, formula, i.source(field)))

    if persistent:
        name = "persistent KV of V4-Flash"
        add("persistent", name, i.persistent, "×", f"{i.persistent}", "persistent")
        name = "all contexts at that factor"
        add("persistent_contexts", name, i.persistent * kept, "B", f"{i.persistent}·{kept}", "persistent")
    add("global_hours", "lifetime of global KV", i.global_hours, "h", f"{i.global_hours}", "global_hours")
    held = Fraction(kept * i.global_hours, 10**9)
    add("global_held", "all contexts for that long", held, "GB·h", f"{kept}·{i.global_hours}/10**9", "global_hours")
    add("window_minutes", "lifetime of window KV", i.window_minutes, "min", f"{i.window_minutes}", "window_minutes")
    held = Fraction(windows * i.window_minutes, 60 * 10**9)
    formula = f"{windows}·{i.window_minutes}/60/10**9"
    add("window_held", "all windows for that long", held, "GB·h", formula, "window_minutes")
    add("host_share", "share of host memory for windows", i.host_share, "%", f"{i.host_share}", "host_share")
    add("host_memory", "host memory", i.host_memory, "B", f"{i.host_memory}", "host_memory")
    fit = i.host_memory * i.host_share // (100 * cache.window_bytes)
    formula = f"floor({i.host_memory}·{i.host_share}/100/{cache.window_bytes})"
    add("host_windows", "windows that fit into the share", fit, "requests", formula, "host_memory")
    return out


def _sum(terms: Iterable[str]) -> str:
    return " + ".join(terms) or "0"


def _times(count: int, of: int | str) -> str:
    return f"{of}" if count == 1 else f"{count}·{of}"


def _plain(value: int | Fraction) -> int | float:
    return int(value) if Fraction(value).denominator == 1 else float(value)


def _number(value: int | Fraction) -> str:
    return f"{_plain(value)}"


def shown(figure: Figure) -> str:
    """The value with its unit; many bytes in powers of 1000 and of 1024 too, many parameters in billions."""
    value = _plain(figure.value)
    text = f"{value:,} {figure.unit}" if isinstance(value, int) else f"{value:,.6g} {figure.unit}"
    if figure.unit == "parameters" and value >= 10**8:
        return f"{text} = {value / 1e9:.4g} billion"
    if figure.unit != "B" or value < 10**6:
        return text
    power = min(int(math.log10(value)) // 3, 4)
    letter = " KMGT"[power]
    return f"{text} = {value / 1000**power:.4g} {letter}B = {value / 1024**power:.4g} {letter}iB"


def table(figures: Sequence[Figure]) -> str:
    """Aligned lines of name, value, formula and source, section by section."""
    rows = [("", "value", "formula", "from"), *((f.name, shown(f), f.formula, f.source) for f in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]

    def line(row: tuple[str, str, str, str]) -> str:
        return f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]}".rstrip()

    lines = [line(rows[0])]
    for section, group in groupby(zip(figures, rows[1:], strict=True), key=lambda pair: pair[0].section):
        lines += [section, *(line(row) for _, row in group)]
    return "\n".join(lines)


def as_json(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """The figures as plain values; a fraction becomes a float."""
    return [{**asdict(figure), "value": _plain(figure.value)} for figure in figures]
