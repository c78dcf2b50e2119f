"""One self-contained HTML file: plotly.js once, compressed, figures as JSON; offline, light, dark and on paper."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio
from plotly.offline import get_plotlyjs

from replayscope.ui.theme import DARK_OF, LIGHT, css_variables, escape

HERE = Path(__file__).parent


def figure_json(figure: go.Figure) -> str:
    """A figure as JSON text; the same figure gives the same bytes, and there is no NaN literal in it."""
    return pio.to_json(figure, validate=False, engine="json", remove_uids=True) or "{}"


def packed_json(figure: go.Figure) -> str:
    """The same for figure.js alone, which unpacks it: the words of a map's cells, nearly all of its text, in parts.

    A page passes the text of a figure through several hands on its way, and each takes as long as it has characters.
    """
    drawn = figure.to_plotly_json()
    for trace in drawn["data"]:
        if trace["type"] == "heatmap" and (parts := _packed_words(trace.get("text", ()))):
            trace["words"] = parts
            del trace["text"]
    return pio.to_json(drawn, validate=False, engine="json", remove_uids=True) or "{}"


def _packed_words(text: Sequence[Sequence[str]]) -> dict[str, list] | None:
    """Words of cells [row][column] as `columns[c] + rows[r] + rests[at[r][c]]`, at = -1 for none; None if they are not
    of the form `column, row<br>rest`."""
    columns, rows = [""] * (len(text[0]) if len(text) else 0), [""] * len(text)
    rests: dict[str, int] = {}
    at = [[-1] * len(columns) for _ in rows]
    for r, line in enumerate(text):
        for c, words in enumerate(line):
            if not words:
                continue
            head, line_break, rest = words.partition("<br>")
            column, comma, row = head.partition(", ")
            fits = columns[c] in ("", column) and rows[r] in ("", f", {row}<br>")
            if not (line_break and comma and fits):
                return None
            columns[c], rows[r] = column, f", {row}<br>"
            at[r][c] = rests.setdefault(rest, len(rests))
    return {"columns": columns, "rows": rows, "rests": list(rests), "at": at}


def facts(figure: go.Figure) -> dict:
    """What a figure says of itself: title, sentence, notes, key, columns, and its height in pixels."""
    meta: Any = figure.layout["meta"]
    return meta


@cache
def stylesheet(document: bool = False) -> str:
    """CSS of cards, tiles and tables; with `document` also of a whole page."""
    parts = [css_variables(), (HERE / "page.css").read_text(), (HERE / "tokens.css").read_text()]
    if document:
        parts.append((HERE / "document.css").read_text())
    return "\n".join(parts)


@cache
def script() -> str:
    """JavaScript that draws figures; it expects `Plotly` when it draws, not when it loads."""
    constants = f"const RS_DARK = {json.dumps(DARK_OF)}, RS_ACCENT = {json.dumps(LIGHT.accent)};"
    return constants + "\n" + (HERE / "figure.js").read_text()


def card(number: int, figure: go.Figure) -> str:
    """The place where figure `number` of a document is drawn. Its words stand in the HTML, where search finds them."""
    meta = facts(figure)
    sentence = " · ".join((meta["sentence"], *meta["notes"]))
    return (
        f'<figure class="rs-card" data-figure="{number}"><figcaption><h2>{escape(meta["title"])}</h2>'
        f'<p>{escape(sentence)}</p></figcaption><div class="rs-plot" id="figure-{number}"></div>'
        '<div class="rs-key"></div></figure>'
    )


def document(title: str, subtitle: str, body: str, figures: list[go.Figure]) -> str:
    """A whole HTML file. title, subtitle: plain text; body: HTML with the `card` of every figure.

    plotly.js is packed: a file with one figure is 2 MB instead of 5, small enough to mail.
    """
    data = "[" + ",\n".join(figure_json(f) for f in figures) + "]"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)} · ReplayScope</title>
<style>
{stylesheet(document=True)}
</style>
</head>
<body class="rs">
<main>
<header>
<h1>ReplayScope</h1><span class="mono">{escape(subtitle)}</span><button type="button" hidden>dark</button>
</header>
{body}
<noscript><p>The figures need JavaScript; the tables above and below them do not.</p></noscript>
</main>
<script type="application/gzip" id="plotly">{_packed(get_plotlyjs())}</script>
<script type="application/gzip" id="figures">{_packed(data)}</script>
<script>
{script()}
(async () => {{
  const unpack = (id) => {{
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'))).text();
  }};
  const button = document.querySelector('header button');
  const wanted = matchMedia('(prefers-color-scheme: dark)');
  const setMode = (dark) => {{
    button.textContent = dark ? 'light' : 'dark';
    return replayscope.setMode(dark);
  }};
  button.hidden = false;
  button.addEventListener('click', () => setMode(!document.body.classList.contains('dark')));
  wanted.addEventListener('change', () => setMode(wanted.matches));
  setMode(wanted.matches);
  const library = document.createElement('script');
  library.textContent = await unpack('plotly');
  document.head.append(library);
  const figures = JSON.parse(await unpack('figures'));
  for (const root of document.querySelectorAll('[data-figure]')) {{
    await replayscope.show(root, figures[Number(root.dataset.figure)]);
  }}
  document.body.dataset.drawn = figures.length;
}})();
</script>
</body>
</html>
"""


@cache
def _packed(text: str) -> str:
    """Text as gzip in base64. mtime is fixed: the same text gives the same bytes."""
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()
