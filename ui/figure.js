// Draws the figures of a page in the colours of its mode. Figures come as plotly JSON in light colours;
// RS_DARK maps each colour to its dark partner. Shared by the Gradio page, the report and exported HTML.
window.replayscope = (() => {
  const WORDS = new Set(['text', 'hovertext', 'customdata', 'ticktext', 'hovertemplate', 'x', 'y', 'z', 'name', 'meta']);
  const CONFIG = {
    responsive: true, displaylogo: false,
    modeBarButtonsToRemove: ['select2d', 'lasso2d', 'autoScale2d', 'zoomIn2d', 'zoomOut2d', 'toggleSpikelines'],
  };
  const held = new Map(); // plot element -> the figure it shows, in light colours
  let printing = false;

  const isDark = () => !printing && document.body.classList.contains('dark');
  const partner = (colour) => (RS_DARK[colour.slice(0, 7)] || colour.slice(0, 7)) + colour.slice(7);
  function recolour(node, key) {
    if (WORDS.has(key)) return node;
    if (Array.isArray(node)) return node.map((v) => recolour(v, key));
    if (node && typeof node === 'object' && !ArrayBuffer.isView(node)) {
      return Object.fromEntries(Object.entries(node).map(([k, v]) => [k, recolour(v, k)]));
    }
    return typeof node === 'string' && node[0] === '#' ? partner(node) : node;
  }

  const metaOf = (entry) => (entry && entry.figure.layout.meta) || {};
  // Column of the marked cut: the last one that starts at or before it, as wide columns hold several; -1 without a mark.
  function columnOf(entry) {
    if (entry.at === undefined) return -1;
    return (metaOf(entry).columns || []).filter((start) => start <= entry.at).length - 1;
  }

  function paint(plot) {
    const entry = held.get(plot);
    if (!entry) return undefined;
    const figure = structuredClone(entry.figure);
    const layout = figure.layout;
    layout.title = undefined;
    layout.showlegend = false; // the key stands in the page, where it can wrap
    layout.margin = Object.assign({}, layout.margin, { t: 26, b: 48 });
    const ticks = layout.xaxis && layout.xaxis.tickvals;
    if (Array.isArray(ticks) && plot.clientWidth < 560) {
      layout.xaxis.tickvals = ticks.filter((_, i) => i % 2 === 0);
      layout.xaxis.ticktext = layout.xaxis.ticktext.filter((_, i) => i % 2 === 0);
    }
    layout.height = entry.height;
    layout.autosize = true;
    layout.width = undefined;
    const width = plot.clientWidth / Math.max((metaOf(entry).columns || []).length, 1);
    for (const trace of figure.data) if (trace.xgap && width < 14) trace.xgap = trace.ygap = 0;
    const column = columnOf(entry);
    if (column >= 0) {
      layout.shapes = (layout.shapes || []).concat({
        type: 'rect', xref: 'x', yref: 'paper', x0: column - 0.5, x1: column + 0.5, y0: 0, y1: 1,
        line: { color: RS_ACCENT, width: 2 }, layer: 'above',
      });
    }
    entry.root.querySelector('.rs-key').replaceChildren(...((layout.meta || {}).key || []).map(keyItem));
    const shown = isDark() ? recolour(figure) : figure;
    return Plotly.react(plot, shown.data, shown.layout, CONFIG);
  }

  // One entry of the key: a class of cell by its name, or [name, colour, dash] of a line.
  function keyItem(entry) {
    const [name, colour, dash] = [].concat(entry);
    const item = document.createElement('span');
    const swatch = document.createElement('i');
    swatch.className = colour ? 'line' : name.replace(/\W+/g, '-');
    if (colour) swatch.style.borderTop = `2px ${dash || 'solid'} ${isDark() ? partner(colour) : colour}`;
    item.append(swatch, name);
    return item;
  }

  // root holds h2, p, .rs-plot and .rs-key; figure is plotly JSON (object or text).
  function show(root, figure) {
    const plot = root.querySelector('.rs-plot');
    if (!plot || !figure) return undefined;
    const parsed = typeof figure === 'string' ? JSON.parse(figure) : figure;
    const meta = parsed.layout.meta || {};
    root.querySelector('h2').textContent = meta.title || '';
    root.querySelector('p').textContent = [meta.sentence, ...(meta.notes || [])].filter(Boolean).join(' · ');
    plot.setAttribute('role', 'img');
    plot.setAttribute('aria-label', meta.title || '');
    const trimmed = ((parsed.layout.margin || {}).t || 84) - 26 + 40;
    const before = held.get(plot);
    held.set(plot, { root, figure: parsed, height: (parsed.layout.height || 420) - trimmed, at: before && before.at });
    const drawn = paint(plot);
    if (!before && drawn) {
      drawn.then(() => plot.on('plotly_click', (event) => {
        const point = event.points[0];
        const columns = metaOf(held.get(plot)).columns || [];
        plot.dispatchEvent(new CustomEvent('rs-select', {
          bubbles: true, detail: { column: columns[point.x], row: point.y },
        }));
      }));
    }
    return drawn;
  }

  // Takes a figure away with its words: nothing of it may stand under another trace's name.
  function clear(root) {
    const plot = root.querySelector('.rs-plot');
    if (held.delete(plot)) Plotly.purge(plot);
    plot.removeAttribute('aria-label');
    for (const part of root.querySelectorAll('h2, p, .rs-key')) part.replaceChildren();
  }

  // Outlines the column of a cut.
  function mark(plot, cut) {
    const entry = held.get(plot);
    if (!entry || cut === undefined || cut === null) return;
    const before = columnOf(entry);
    entry.at = cut;
    if (columnOf(entry) !== before) paint(plot);
  }
  // The same by the number of the column, where no columns were merged.
  function markColumn(plot, column) {
    const meta = metaOf(held.get(plot));
    if (!meta.pooled) mark(plot, (meta.columns || [])[column]);
  }
  const meta = (plot) => metaOf(held.get(plot));

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

  return { show, clear, mark, markColumn, meta, setMode, repaint, isDark };
})();
