// Draws the figures of a page in the colours of its mode. Figures come as plotly JSON in light colours;
// RS_DARK maps each colour to its dark partner. Shared by the Gradio page, the report and exported HTML.
window.replayscope = (() => {
  const WORDS = new Set(['text', 'hovertext', 'customdata', 'ticktext', 'hovertemplate', 'x', 'y', 'z', 'name', 'meta']);
  // Dragging zooms and a double click resets; Plotly's own buttons would stand over the marks, and one of them uploads.
  const CONFIG = { responsive: true, displaylogo: false, displayModeBar: false };
  const held = new Map(); // plot element -> the figure it shows, in light colours
  let printing = false;

  const isDark = () => !printing && document.body.classList.contains('dark');
  const partner = (colour) => (RS_DARK[colour.slice(0, 7)] || colour.slice(0, 7)) + colour.slice(7);
  const partnerNow = (colour) => (isDark() ? partner(colour) : colour);
  function recolour(node, key) {
    if (WORDS.has(key)) return node;
    if (Array.isArray(node)) return node.map((v) => recolour(v, key));
    if (node && typeof node === 'object' && !ArrayBuffer.isView(node)) {
      return Object.fromEntries(Object.entries(node).map(([k, v]) => [k, recolour(v, k)]));
    }
    return typeof node === 'string' && node[0] === '#' ? partner(node) : node;
  }

  const metaOf = (entry) => (entry && entry.figure.layout.meta) || {};
  const columnsOf = (entry) => metaOf(entry).columns || [];
  // Maps and lines over cuts count columns on x; other curves have positions there.
  function counts(entry) {
    const range = (entry.figure.layout.xaxis || {}).range || [];
    return range[0] === -0.5 && range[1] === Math.max(columnsOf(entry).length, 1) - 0.5;
  }
  // A curve with a point for each of `columns` may have its logarithm on x; others have the positions themselves.
  const isWhole = (entry, curve) => (curve.x || []).length === columnsOf(entry).length;
  function placeOf(entry, at) {
    const whole = entry.figure.data.find((curve) => isWhole(entry, curve));
    if (whole && columnsOf(entry).includes(at)) return whole.x[columnsOf(entry).indexOf(at)];
    return entry.figure.data.some((curve) => (curve.x || []).includes(at)) ? at : undefined;
  }
  function chosenBy(entry, point) {
    if (counts(entry)) return columnsOf(entry)[point.x];
    return isWhole(entry, point.data) ? columnsOf(entry)[point.pointIndex] : point.x;
  }
  const isMap = (entry) => entry.figure.data.some((trace) => trace.type === 'heatmap');

  // The outline of what is chosen: { at, row }, a column by its cut or position, and the row of a layer.
  function marks(entry) {
    const { at, row } = entry.chosen || {};
    if (at === undefined || at === null || at < 0) return [];
    const line = { color: partnerNow(RS_ACCENT), width: 2 };
    const shape = (x0, x1, y0, y1, yref, strong) => ({
      type: 'rect', xref: 'x', yref, x0, x1, y0, y1, layer: 'above', line: { ...line, width: strong ? 2.5 : 1.25 },
    });
    if (!counts(entry)) {
      const x = placeOf(entry, at);
      return x === undefined ? [] : [shape(x, x, 0, 1, 'paper', false)];
    }
    // Wide columns hold several: the last one that starts at or before.
    const column = columnsOf(entry).filter((start) => start <= at).length - 1;
    if (column < 0) return [];
    const found = [shape(column - 0.5, column + 0.5, 0, 1, 'paper', false)];
    if (isMap(entry) && row >= 0) {
      const cell = shape(column - 0.5, column + 0.5, row - 0.5, row + 0.5, 'y', true);
      // A line on a pale one shows on light and on dark cells.
      found.push({ ...cell, line: { color: partnerNow('#ffffff'), width: 5 } }, cell);
    }
    return found;
  }

  function paint(plot) {
    const entry = held.get(plot);
    if (!entry) return undefined;
    // Of the curves only their own keys are changed; their long arrays stay as they are.
    const data = entry.figure.data.map((trace) => ({ ...trace }));
    const layout = structuredClone(entry.figure.layout);
    const figure = { data, layout };
    layout.title = undefined;
    layout.showlegend = false; // the key stands in the page, where it can wrap
    layout.margin = Object.assign({}, layout.margin, { t: 26, b: 48 });
    const ticks = layout.xaxis && layout.xaxis.tickvals;
    if (Array.isArray(ticks) && plot.clientWidth < 560) {
      const step = plot.clientWidth < 380 ? 3 : 2;
      layout.xaxis.tickvals = ticks.filter((_, i) => i % step === 0);
      layout.xaxis.ticktext = layout.xaxis.ticktext.filter((_, i) => i % step === 0);
    }
    layout.height = entry.height;
    layout.autosize = true;
    layout.width = undefined;
    const width = plot.clientWidth / Math.max(columnsOf(entry).length, 1);
    for (const trace of figure.data) if (trace.xgap && width < 14) trace.xgap = trace.ygap = 0;
    entry.root.querySelector('.rs-key').replaceChildren(...((layout.meta || {}).key || []).map(keyItem));
    const shown = isDark() ? recolour(figure) : figure;
    entry.shapes = shown.layout.shapes || [];
    shown.layout.shapes = entry.shapes.concat(marks(entry));
    entry.width = plot.clientWidth;
    return Plotly.react(plot, shown.data, shown.layout, CONFIG);
  }

  // One entry of the key: a class of cell by its name, or [name, colour, dash] of a line.
  function keyItem(entry) {
    const [name, colour, dash] = [].concat(entry);
    const item = document.createElement('span');
    const swatch = document.createElement('i');
    swatch.className = colour ? 'line' : name.replace(/\W+/g, '-');
    if (colour) swatch.style.borderTop = `2px ${dash || 'solid'} ${partnerNow(colour)}`;
    item.append(swatch, name);
    return item;
  }

  // Words of a map's cells, which the page gets in parts (packed_json).
  function unpack(trace) {
    const { columns, rows, rests, at } = trace.words;
    trace.text = at.map((line, r) => line.map((i, c) => (i < 0 ? '' : columns[c] + rows[r] + rests[i])));
    delete trace.words;
  }

  // root holds h2, p, .rs-plot and .rs-key; figure is plotly JSON (object or text).
  function show(root, figure) {
    const plot = root.querySelector('.rs-plot');
    if (!plot || !figure) return undefined;
    const parsed = typeof figure === 'string' ? JSON.parse(figure) : figure;
    for (const trace of parsed.data) if (trace.words) unpack(trace);
    const meta = parsed.layout.meta || {};
    root.querySelector('h2').textContent = meta.title || '';
    root.querySelector('p').textContent = [meta.sentence, ...(meta.notes || [])].filter(Boolean).join(' · ');
    plot.setAttribute('role', 'img');
    plot.setAttribute('aria-label', meta.title || '');
    const trimmed = ((parsed.layout.margin || {}).t || 84) - 26 + 40;
    const before = held.get(plot);
    const height = (parsed.layout.height || 420) - trimmed;
    held.set(plot, { root, figure: parsed, height, chosen: before && before.chosen });
    const drawn = paint(plot);
    if (!before && drawn) {
      widths.observe(plot);
      drawn.then(() => plot.on('plotly_click', (event) => {
        const point = event.points[0];
        const entry = held.get(plot);
        const at = chosenBy(entry, point);
        if (at === undefined) return;
        plot.dispatchEvent(new CustomEvent('rs-select', {
          bubbles: true, detail: isMap(entry) ? { at, row: point.y } : { at },
        }));
      }));
    }
    return drawn;
  }
  // A figure on a tab that was hidden, or in a window that changed, is drawn for its new width.
  const widths = new ResizeObserver((changes) => {
    for (const { target } of changes) {
      const entry = held.get(target);
      if (entry && target.clientWidth && Math.abs(entry.width - target.clientWidth) > 1) paint(target);
    }
  });

  // Takes a figure away with its words: nothing of it may stand under another trace's name.
  function clear(root) {
    const plot = root.querySelector('.rs-plot');
    if (held.delete(plot)) {
      widths.unobserve(plot);
      const empty = plot.cloneNode(false);
      plot.replaceWith(empty);
      empty.removeAttribute('aria-label');
      // Plotly may still be about to tell of a pointer that was over it, which it cannot once it is purged.
      setTimeout(() => Plotly.purge(plot), 2000);
    }
    for (const part of root.querySelectorAll('h2, p, .rs-key')) part.replaceChildren();
  }

  // Outlines what is chosen, without drawing the figure again.
  function mark(plot, chosen) {
    const entry = held.get(plot);
    const same = entry && entry.chosen && entry.chosen.at === chosen.at && entry.chosen.row === chosen.row;
    if (!entry || same) return undefined;
    entry.chosen = chosen;
    return Plotly.relayout(plot, { shapes: entry.shapes.concat(marks(entry)) });
  }
  // The same by the number of the column, where no columns were merged; the row stays.
  function markColumn(plot, column) {
    const entry = held.get(plot);
    if (!entry || metaOf(entry).pooled) return;
    mark(plot, { at: columnsOf(entry)[column], row: (entry.chosen || {}).row });
  }

  const repaint = () => Promise.all([...held.keys()].map((plot) => {
    if (!plot.isConnected) { held.delete(plot); return undefined; }
    return paint(plot);
  }));
  function setMode(dark) {
    document.body.classList.toggle('dark', dark);
    return follow();
  }
  let mode;
  function follow() {
    const now = isDark() ? 'dark' : 'light';
    if (now === mode) return undefined;
    mode = now;
    return repaint();
  }
  function watchBody() {
    mode = isDark() ? 'dark' : 'light';
    new MutationObserver(follow).observe(document.body, { attributes: true, attributeFilter: ['class'] });
  }
  if (document.body) watchBody(); else document.addEventListener('DOMContentLoaded', watchBody);
  window.addEventListener('beforeprint', () => { printing = true; document.body.classList.add('rs-print'); repaint(); });
  window.addEventListener('afterprint', () => { printing = false; document.body.classList.remove('rs-print'); repaint(); });

  return { show, clear, mark, markColumn, setMode, repaint, isDark };
})();
