"""Tables and figures of docs/findings.md and docs/mini.md from measured numbers: `python benchmarks/findings_text.py`.

Reads docs/data/findings.json and docs/data/scores.jsonl; writes what stands between the markers `<!-- table: NAME -->`
and `<!-- end -->` of the two pages, and the figures beside them. No number of theirs is typed by hand.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from replayscope.model.preset_files import presets

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("findings.md", "mini.md")
Record = dict[str, Any]


def wilson(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927): it stays inside 0 … 1 and is honest at the ends."""
    p, d = right / n, 1 + z * z / n
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (middle - half) / d), min(1.0, (middle + half) / d)


def share(right: int, n: int) -> str:
    low, high = wilson(right, n)
    return f"{right}/{n} ({100 * low:.0f}–{100 * high:.0f} %)"


def number(found: Record) -> str:
    """A median with its interval, as far as there is one."""
    if not found["n"]:
        return "–"
    return f"{found['median']:.2g} ({found['low']:.2g}–{found['high']:.2g})"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def way(record: Record, window: int) -> str:
    replay = record["replay"]
    return record["arm"] if replay is None else f"{record['arm']} R={replay // window if replay > window else ''}W"


def tables(findings: list[Record], scores: list[Record]) -> dict[str, str]:
    """name → Markdown table. scores may be empty."""
    first = findings[0]
    window, models = first["window"], [f["model"] for f in findings]
    made = {}
    for f in findings:
        name, pooled = f["model"], defaultdict(lambda: [0, 0, 0, 0])
        placed: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        followed: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        for s in (s for s in scores if s["model"] == name):
            at = pooled[s["task"], way(s, window)]
            at[0] += s["exact"]
            at[1] += s["n"]
            at[2] += s["lost"]
            at[3] += s["won"]
            for kind, arm, group in ((placed, ("both", window), "place"), (followed, ("full", None), "suffix")):
                if (s["arm"], s["replay"]) == arm:
                    cell = kind[s["task"], s[group]]
                    cell[0] += s["exact"]
                    cell[1] += s["n"]
        tasks = list(dict.fromkeys(t for t, _ in pooled))
        ways = list(dict.fromkeys(w for _, w in pooled))
        made[f"scores {name}"] = table(
            ["task", *ways],
            ([t, *(share(*pooled[t, w][:2]) if w == "full" else gained(*pooled[t, w]) for w in ways)] for t in tasks),
        )
        for kind, cells in (("places", placed), ("suffixes", followed)):
            columns = list(dict.fromkeys(c for _, c in cells))
            made[f"{kind} {name}"] = table(
                ["task", *columns], ([t, *(share(*cells[t, c]) for c in columns)] for t in tasks)
            )
        made[f"carried {name}"] = carried(f["carried"], window)
        made[f"predicts {name}"] = predicts(f["predicts"], window)
        made[f"failure {name}"] = failure([s for s in scores if s["model"] == name], window)
    layers = range(len(first["layers"]["window_kv window"]))
    made["layers"] = table(
        ["layer", *(f"{what}, {m}" for m in models for what in ("window KV", "hidden behind the cut"))],
        (
            [str(l), *(number(f["layers"][key][l]) for f in findings for key in ("window_kv window", "hidden suffix"))]
            for l in layers
        ),
    )
    made["lengths"] = table(
        ["R", *(f"{what}, {m}" for m in models for what in ("window KV, worst layer", "KL behind the cut"))],
        (
            [str(rows[0]["replay"]), *(number(r[k]) for r in rows for k in ("window", "kl"))]
            for rows in zip(*(f["lengths"] for f in findings), strict=True)
        ),
    )
    made["enough"] = table(
        ["error of the window KV below", *(f"R, {m}" for m in models), "R that is exact"],
        (
            [f"{rows[0]['below']:g}", *(str(r["replay"] or "more") for r in rows), str(rows[0]["exact"])]
            for rows in zip(*(f["enough"] for f in findings), strict=True)
        ),
    )
    made["arms"] = table(["arm", *models], ([arm, *(number(f["kl"][arm]) for f in findings)] for arm in first["kl"]))
    for arm in ("encoder", "decoder"):
        made[f"distance {arm}"] = table(
            ["tokens behind", *(f"{what}, {m}" for m in models for what in ("hidden, last layer", "KL"))],
            (
                [f"{rows[0]['from']}–{2 * rows[0]['from']}", *(number(r[k]) for r in rows for k in ("rel_l2", "kl"))]
                for rows in zip(*(f["distance"][arm] for f in findings), strict=True)
            ),
        )
    made["hits"] = table(
        ["hits on the way", *models],
        (
            [str(rows[0]["hits"]), *(number(r["kl"]) for r in rows)]
            for rows in zip(*(f["hits"] for f in findings), strict=True)
        ),
    )
    where = list(dict.fromkeys((s["point"], s["region"]) for s in first["smooth"]))
    made["smooth"] = table(["where", *models], ([", ".join(w), *(smooth(f, w) for f in findings)] for w in where))
    return made


def smooth(finding: Record, where: tuple[str, str]) -> str:
    """Median over the texts of the share of the divergence that is there without flips too."""
    found = [s["share"] for s in finding["smooth"] if (s["point"], s["region"]) == where]
    return f"{100 * np.median(found):.0f} %"


def gained(exact: int, n: int, lost: int, won: int) -> str:
    return f"{exact}/{n}" + (f" (−{lost} +{won})" if lost or won else "")


def carried(records: list[Record], window: int) -> str:
    """A relay's answers by distance: those of full prefill among those asked for, and which of them each way keeps."""
    ways = list(dict.fromkeys(way(r, window) for r in records))
    by_gap: dict[int, list[Record]] = defaultdict(list)
    for r in records:
        by_gap[r["gap"]].append(r)
    rows = (
        [str(gap), share(full["n"], full["asked"]), *(f"{r['kept']}/{r['n']}" for r in rest)]
        for gap, (full, *rest) in by_gap.items()
    )
    return table(["tokens from the number to the cut", *ways], rows)


def predicts(records: list[Record], window: int) -> str:
    """Whether the divergence of a relay's answer tells that it is lost, way by way."""
    rows = []
    for r in (r for r in records if r["lost"]):
        told = "–" if r["share"] is None else f"{r['share']:.3f} ({r['low']:.3f}–{r['high']:.3f})"
        most = "–" if r["most"] is None else f"{r['most']:.2g}"
        rows.append([way(r, window), f"{r['lost']}/{r['lost'] + r['kept']}", told, f"{r['least']:.2g}", most])
    head = ["way", "answers lost", "lost above kept", "smallest KL of a lost one", "largest of a kept one"]
    return table(head, rows) if rows else "No answer was lost."


def failure(scores: list[Record], window: int) -> str:
    """Answers lost against the divergence of the answer, way by way."""
    found: dict[str, list[Record]] = defaultdict(list)
    for s in scores:
        if s["arm"] not in ("full", "hit", "exact"):
            found[way(s, window)].append(s)
    rows = []
    for name, group in found.items():
        lost, right = sum(s["lost"] for s in group), sum(s["exact"] - s["won"] + s["lost"] for s in group)
        medians = [[s[k] for s in group if s[k] is not None] for k in ("kl_lost", "kl_kept")]
        rows.append([name, f"{lost}/{right}", *(f"{np.median(m):.2g}" if m else "–" for m in medians)])
    return table(["way", "answers lost", "largest KL of the answer where lost", "where kept"], rows)


def written(page: str, made: dict[str, str]) -> str:
    """The page with every marked table replaced. Raises KeyError for a marker that no table belongs to."""
    return re.sub(
        r"(<!-- table: (.*?) -->\n).*?(<!-- end -->)",
        lambda m: m[1] + "\n" + made[m[2]] + "\n\n" + m[3],
        page,
        flags=re.DOTALL,
    )


def measured() -> tuple[list[Record], list[Record]]:
    data = DOCS / "data"
    scores = [json.loads(line) for line in (data / "scores.jsonl").read_text().splitlines()]
    return json.loads((data / "findings.json").read_text()), scores


def main() -> None:
    findings, scores = measured()
    made = tables(findings, scores)
    for name in PAGES:
        path = DOCS / name
        path.write_text(written(path.read_text(encoding="utf-8"), made), encoding="utf-8")
    from findings_figures import curve, figures

    with safe_open(presets()["mini"], "np") as file:
        before = json.loads(file.metadata()["before"])
    # The last training in which tasks climbed: those behind it begin at the top.
    *_, points = (made["curve"] for made in before if made["recipe"].get("top") is False)
    drawn = {f"findings-{name}": figure for name, figure in figures(findings).items()}
    drawn["mini-curve"] = curve(points)
    for name, figure in drawn.items():
        figure.write_image(DOCS / f"{name}.png", width=860, height=380, scale=1.5)


if __name__ == "__main__":
    main()
