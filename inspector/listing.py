"""What `replayscope list` knows: for each topic, rows of a table. Imports what a topic needs only when it is asked."""

import json
from collections.abc import Callable
from typing import Any

from replayscope.model.hf_families import FAMILIES, TRIED_WITH
from replayscope.model.preset_files import presets as models

Row = dict[str, Any]
_TRIED = f"tried with transformers {TRIED_WITH}"


def _models() -> list[Row]:
    rows = []
    for name, file in models().items():
        with file.open("rb") as weights:
            header = json.loads(weights.read(int.from_bytes(weights.read(8), "little")))
        made = header.pop("__metadata__")
        numbers = sum(_product(tensor["shape"]) for tensor in header.values())
        replay = json.loads(made["recipe"])["replay_share"] > 0
        how = "trained further with bounded replay" if replay else "trained"
        about = (
            f"bytes as tokens, {how} on {int(made['tokens']) / 1e6:.1f} M of them, seed {made['seed']}; docs/mini.md"
        )
        rows.append({"name": name, "parameters": f"{numbers / 1e6:.1f} M parameters", "about": about})
    return rows + [
        {"name": "FOLDER or OWNER/NAME", "parameters": tried.config, "about": f"{name}: {tried.has}; {_TRIED}"}
        for name, tried in FAMILIES.items()
    ]


def _product(shape: list[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _hooks() -> list[Row]:
    from replayscope.inspector.points import LAYER_POINTS, POINTS

    return [
        {"name": f"layers.{{i}}.{name}" if name in LAYER_POINTS else name, "about": about}
        for name, about in POINTS.items()
    ]


def _metrics() -> list[Row]:
    from replayscope.inspector.metrics import METRICS

    return [{"name": name, "unit": metric.unit or "-", "about": metric.says} for name, metric in METRICS.items()]


def _semantics() -> list[Row]:
    from replayscope.inspector.engines import ENGINES, rule_table
    from replayscope.inspector.features import FEATURES, feature

    rows = list(rule_table())
    for name in ENGINES:
        for asked in FEATURES:
            found = feature(name, asked)
            says = f"{found.verdict}: {found.limits}" if found.limits else found.verdict
            rows.append((name, asked, says, found.source))
    rows.sort(key=lambda row: list(ENGINES).index(row[0]))
    return [dict(zip(("name", "rule", "says", "source"), row, strict=True)) for row in rows]


def _tasks() -> list[Row]:
    from replayscope.inspector.task_files import FIELDS
    from replayscope.model.tasks import PLACES, SUFFIXES, TASKS

    where = f"cut: {', '.join(PLACES)}; suffix: {', '.join(SUFFIXES)}"
    rows = [(name, f"{task.chance:.2g}", task.says, where) for name, task in TASKS.items()]
    fields = ", ".join(FIELDS)
    rows.append(("your own", "-", f"a JSONL file with {fields} (docs/judge.md)", "cut: the file's"))
    return [dict(zip(("name", "chance of a guess", "about", "variants"), row, strict=True)) for row in rows]


def _arms() -> list[Row]:
    from replayscope.inspector.semantics import ARMS, BROKEN

    rows = [{"name": name, "about": about} for name, about in ARMS.items()]
    rows.append({"name": "frozen:ARM", "about": "the arm with full's top-k and experts: smooth error only"})
    rows.append({"name": "oracle:ARM", "about": "the same semantics as one full-length pass with dense masks"})
    return rows + [{"name": f"broken:{kind}", "about": f"wrong on purpose: {about}"} for kind, about in BROKEN.items()]


def _figures() -> list[Row]:
    from replayscope.ui.figures import FIGURES

    return [{"name": name, "about": (figure.__doc__ or "").split("\n")[0]} for name, figure in FIGURES.items()]


def _samples() -> list[Row]:
    from replayscope.inspector.samples import SAMPLES

    return [{"name": name, "about": sample.description, "source": sample.source} for name, sample in SAMPLES.items()]


TOPICS: dict[str, Callable[[], list[Row]]] = {
    "models": _models,
    "hooks": _hooks,
    "metrics": _metrics,
    "semantics": _semantics,
    "arms": _arms,
    "figures": _figures,
    "samples": _samples,
    "tasks": _tasks,
}
