"""What bounded replay does to the embedded models: `python benchmarks/findings.py -m mini -m mini-replay -o FILE`.

Sweeps over the embedded texts with cuts all along them; every number is a median over texts and cuts with a bootstrap
interval. `docs/findings.md` says what follows; benchmarks/findings_text.py makes its tables and figures from FILE.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replayscope.inspector import samples
from replayscope.inspector.judge_stats import bootstrap
from replayscope.inspector.metrics import metric
from replayscope.inspector.options import RunOptions
from replayscope.inspector.prompts import Prompt
from replayscope.inspector.scoring import Way, scored
from replayscope.inspector.smooth import smooth_shares
from replayscope.inspector.usecases import write_trace
from replayscope.model import presets, reference, tasks, tokenizer
from replayscope.model.weights import Model
from replayscope.traces.reader import TraceReader

TOKENS = 1024
CUTS = "160:880:144"
DECODED = 128
REPLAYS = "W,2W,3W,4W,6W,exact"
PASSED = (1e-1, 1e-2, 1e-3, 1e-4)
ARMS = ("encoder", "decoder", "both")
HITS = (1, 2, 4, 8)
GAPS = tuple(range(8, 160, 16))
ASKED = 40  # prompts per distance


def middle(values: Iterable[float]) -> dict[str, Any]:
    """Median with its 95 % bootstrap interval; a number that could not be measured is left out and not counted."""
    kept = np.array([v for v in values if np.isfinite(v)])
    if not len(kept):
        return {"n": 0}
    found = bootstrap(kept, "q50", 0.975, 2000, 0)
    return {"n": len(kept), "median": found.value, "low": found.low, "high": found.high}


def sweeps(model: str, folder: Path) -> dict[str, list[TraceReader]]:
    """Per text two traces: the encoder over all replay lengths, and every arm at R = W with the choices frozen too."""
    made: dict[str, list[TraceReader]] = {"lengths": [], "arms": []}
    for name in samples.SAMPLES:
        common = {"model": model, "prompt": Prompt("sample", name), "tokens": TOKENS, "cuts": CUTS}
        arms = {
            "lengths": (("full", "repeat", "rechunk", "hit", "encoder"), REPLAYS, 0),
            "arms": (("full", "repeat", "rechunk", "hit", *ARMS, "frozen:encoder"), "W", DECODED),
        }
        for kind, (which, replay, forced) in arms.items():
            out = folder / f"{model}-{name}-{kind}.h5"
            began = time.perf_counter()
            write_trace(RunOptions(**common, out=out, arms=which, replay=replay, forced=forced, rows=forced > 0))
            print(f"{out.name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
            made[kind].append(TraceReader(out))
    return made


def cells(traces: list[TraceReader], point: str, name: str, region: str, **wanted: Any) -> np.ndarray:
    """[cell, layer]: a metric against ``full`` in a region, of every run (over all traces) with the wanted fields."""
    out = []
    for trace in traces:
        table = trace.table("full", point)
        values = metric(table, name)[:, :, table.bucket(region)]
        out += [values[r.index] for r in trace.runs if all(getattr(r, k) == v for k, v in wanted.items())]
    return np.array(out)


def by_layer(traces: list[TraceReader], **wanted: Any) -> dict[str, Any]:
    """Relative L2 of the rebuilt window's KV and of the suffix's hidden states, layer by layer."""
    return {
        f"{point} {region}": [middle(column) for column in cells(traces, point, "rel_l2", region, **wanted).T]
        for point, region in (("window_kv", "window"), ("hidden", "suffix"))
    }


def by_distance(traces: list[TraceReader], arm: str) -> list[dict[str, Any]]:
    """Relative L2 of the last layer's hidden state and KL in nats by distance of the token from the cut at R = W.

    For the decoder, which has no cut, the distance is that of a decoded token from the prompt's end.
    """
    found: dict[int, dict[str, list[float]]] = {}
    for trace in traces:
        for run in (r for r in trace.runs if r.arm == arm):
            start = run.cut if run.cut is not None else run.prompt_end
            for point, name in (("hidden", "rel_l2"), ("logits", "kl")):
                rows = trace.rows("full", point, run.index)
                values = metric(rows, name)[-1]
                behind = np.asarray(rows.position) - start
                for power in range(10):
                    here = (behind >= 2**power - 1) & (behind < 2 ** (power + 1) - 1)
                    if here.any():
                        at = found.setdefault(2**power - 1, {"rel_l2": [], "kl": []})
                        at[name].append(float(np.median(values[here])))
    return [{"from": k, **{n: middle(v) for n, v in found[k].items()}} for k in sorted(found)]


def decoded_kl(traces: list[TraceReader], arm: str) -> dict[str, Any]:
    """KL(full‖arm) in nats, mean over the decoded tokens of a run, which every arm has, whatever it trims."""
    found = []
    for trace in traces:
        for run in (r for r in trace.runs if r.arm == arm):
            rows = trace.rows("full", "logits", run.index)
            kl = metric(rows, "kl")[-1]
            found.append(float(kl[np.asarray(rows.position) >= run.prompt_end].mean()))
    return middle(found)


def by_length(traces: list[TraceReader]) -> list[dict[str, Any]]:
    """For each replay length: the window KV's relative L2 in the worst layer, and the suffix's KL."""
    lengths = sorted({r.replay for r in traces[0].runs if r.arm == "encoder" and r.replay})
    return [
        {
            "replay": length,
            "window": middle(
                np.nanmax(cells(traces, "window_kv", "rel_l2", "window", arm="encoder", replay=length), 1)
            ),
            "kl": middle(cells(traces, "logits", "kl", "suffix", arm="encoder", replay=length)[:, 0]),
        }
        for length in lengths
    ]


def enough(rows: list[dict[str, Any]], exact: int) -> list[dict[str, Any]]:
    """Per threshold: the smallest replay length tried whose median worst-layer error is below it."""
    out = []
    for bound in PASSED:
        below = [r["replay"] for r in rows if r["window"]["n"] and r["window"]["median"] < bound]
        out.append({"below": bound, "replay": min(below, default=None), "exact": exact})
    return out


def hits_so_far(model: Model, ids: Tensor, hits: int, window: int) -> Tensor:
    """log-probabilities [N, V] of the tokens behind the last of ``hits`` evenly spaced hits with encoder replay.

    Every hit builds on the global entries as the turns before left them: those of rows computed behind a hit are
    inexact, cached, and never computed again.
    """
    c = model.config
    cuts = [2 * (len(ids) * 7 // 8 * (i + 1) // hits // 2) for i in range(hits)]
    kept: dict[int, tuple[int, Tensor, Tensor]] = {}
    logits = torch.empty(0)
    for turn, cut in enumerate([0, *cuts]):
        start = max(0, cut - window)
        rules = reference.Rules(boundary=dict.fromkeys(c.layers, start).__getitem__, prefix=kept)
        stop = cuts[turn] if turn < hits else len(ids)
        entries: dict[int, tuple[int, Tensor, Tensor]] = {}
        with torch.no_grad():
            for frame in reference.dense_pass(model, ids[None, :stop], rules):
                if frame.layer in c.kv_source_layer_ids:
                    kv, key = frame.tensors["global_kv"], frame.tensors["index_k"]
                    entries[frame.layer] = stop // c.compress_ratios[frame.layer], kv, key
                if "logits" in frame.tensors:
                    logits = frame.tensors["logits"][0].log_softmax(-1)
        kept = entries
    return logits


def compounding(model: Model) -> list[dict[str, Any]]:
    """KL(full‖arm) in nats over the last eighth of each text, after one hit there, and after more on the way."""
    out = []
    N, window = TOKENS, model.config.sliding_window
    texts = [torch.tensor(tokenizer.encode(samples.load(name))) for name in samples.SAMPLES]
    pieces = [t[at : at + N] for t in texts for at in range(0, len(t) - N + 1, N // 2)][:6]
    tail = slice(2 * (N * 7 // 8 // 2), N)
    for hits in HITS:
        kls = []
        for ids in pieces:
            with torch.no_grad():
                *_, last = reference.dense_pass(model, ids[None])
            full = last.tensors["logits"][0].log_softmax(-1)[tail]
            arm = hits_so_far(model, ids, hits, window)[tail]
            kls.append(float((full.exp() * (full - arm)).sum(-1).clamp(min=0).mean()))
        out.append({"hits": hits, "kl": middle(kls)})
    return out


def carried(model: Model) -> dict[str, list[dict[str, Any]]]:
    """Answers to `relay`, whose number windows could carry to the question, by distance and by way of running it.

    carried: gap: tokens between the number and the cut, which the question follows at once. n: answers that were right
    in full prefill; kept: those that still were; kl: KL(full‖arm) of the answer in nats. predicts: see `predicts`.
    """
    window = model.config.sliding_window
    ways = (
        Way("full"),
        *(Way("encoder", factor * window) for factor in (1, 2, 3, 4, 6)),
        Way("decoder"),
        Way("both", window),
    )
    out, largest = [], {way: ([], []) for way in ways[1:]}
    for gap in GAPS:
        prompts = [
            tasks.make("relay", 10_000 + seed, TOKENS, "before", "none", samples.load("prose"), gap)
            for seed in range(ASKED)
        ]
        found = [by_way for _, _, by_way in scored(model, prompts, tokenizer.encode, ways)]
        for way in ways:
            right = [by_way[way] for by_way in found if by_way[Way("full")].exact]
            for answer in right if way in largest else ():
                largest[way][answer.exact].append(answer.kl_max)
            kept = sum(answer.exact for answer in right)
            kl = middle(by_way[way].kl for by_way in found)
            out.append(
                {"gap": gap, "arm": way.arm, "replay": way.replay, "asked": len(found), "n": len(right), "kept": kept}
                | {"kl": kl}
            )
    told = [{"arm": way.arm, "replay": way.replay, **predicts(*found)} for way, found in largest.items()]
    return {"carried": out, "predicts": told}


def predicts(lost: list[float], kept: list[float]) -> dict[str, Any]:
    """How well the largest KL of an answer tells lost answers from kept ones.

    share: chance that a lost answer has the larger KL of a lost and a kept one, ties counting half (the area under the
    ROC curve; Mann and Whitney 1947), with a 95 % bootstrap interval; None without both kinds. least: the smallest KL
    of a lost answer; most: the largest of a kept one, in nats.
    """
    found: dict[str, Any] = {"lost": len(lost), "kept": len(kept), "share": None}
    found |= {"least": min(lost, default=None), "most": max(kept, default=None)}
    if lost and kept:
        a, b = np.array(lost), np.array(kept)
        wins = (a[:, None] > b) + 0.5 * (a[:, None] == b)
        rng = np.random.default_rng(0)
        again = [
            wins[np.ix_(rng.integers(len(a), size=len(a)), rng.integers(len(b), size=len(b)))].mean()
            for _ in range(2000)
        ]
        found |= {
            "share": float(wins.mean()),
            "low": float(np.quantile(again, 0.025)),
            "high": float(np.quantile(again, 0.975)),
        }
    return found


def finding(name: str, folder: Path) -> dict[str, Any]:
    """Everything that is measured on one model."""
    model, digest = presets.load_any(name, torch.float32)
    made = sweeps(name, folder)
    c = model.config
    window, exact = c.sliding_window, c.num_hidden_layers * (c.sliding_window - 1) + 1
    lengths = by_length(made["lengths"])
    return {
        "model": name,
        "weights": digest[:16],
        "window": window,
        "layers": by_layer(made["arms"], arm="encoder"),
        "noise": by_layer(made["arms"], arm="hit"),
        "decoder layers": by_layer(made["arms"], arm="decoder"),
        "lengths": lengths,
        "enough": enough(lengths, exact),
        "kl": {arm: decoded_kl(made["arms"], arm) for arm in ARMS},
        "distance": {arm: by_distance(made["arms"], arm) for arm in ARMS},
        "smooth": [
            {"point": s.point, "region": s.region, "share": s.share, "cells": s.cells}
            for trace in made["arms"]
            for s in smooth_shares(trace)
        ],
        "hits": compounding(model),
        **carried(model),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures what bounded replay does to the embedded models.")
    parser.add_argument("-m", "--model", action="append", help="a preset or folder; may be given again (default mini)")
    parser.add_argument("-o", "--output", type=Path, required=True, help="JSON")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="replayscope-findings-") as folder:
        found = [finding(model, Path(folder)) for model in options.model or ["mini"]]
    options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
