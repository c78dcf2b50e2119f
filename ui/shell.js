// What the Gradio page adds to figure.js: tabs, the address of a view, the marks of what is chosen, light and dark.
Object.assign(window.replayscope, (() => {
  const figures = window.replayscope;
  const wanted = matchMedia('(prefers-color-scheme: dark)');
  let chosen = {};

  // What is chosen on a figure, by the axis that its columns stand for.
  function markOf(root) {
    const place = root.closest('.rs-by-cut, .rs-by-position');
    if (!place) return {};
    return { at: place.matches('.rs-by-cut') ? chosen.cut : chosen.position, row: chosen.layer };
  }
  function place(root, value) {
    root.hidden = !value;
    if (!value) return figures.clear(root);
    const plot = root.querySelector('.rs-plot');
    return Promise.resolve(figures.show(root, value)).then(() => figures.mark(plot, markOf(root)));
  }
  // A click on a figure, with the axis that it was on.
  function clicked(element, detail) {
    return { ...detail, axis: ['cut', 'position', 'replay', 'layer'].find((axis) => element.matches(`.rs-by-${axis} *`)) };
  }
  // A click on a token chooses its position.
  function choosesTokens(element, act) {
    element.addEventListener('click', (event) => {
      const token = event.target.closest('[data-position]');
      if (token) act({ axis: 'position', at: Number(token.dataset.position) });
    });
  }
  function markToken() {
    for (const token of document.querySelectorAll('.rs-tokens .chosen')) token.classList.remove('chosen');
    const token = document.querySelector(`.rs-tokens [data-position="${chosen.position}"]`);
    if (token) token.classList.add('chosen');
  }

  // What is said of a whole trace may come when another one is shown: each such part looks at what is shown now.
  const lates = [];
  const late = (draw) => lates.push(draw);
  const showLate = () => lates.forEach((draw) => draw(chosen.trace));

  // The mark follows the slider before the server has answered.
  function follow(column) {
    for (const plot of document.querySelectorAll('.rs-by-cut .rs-plot')) figures.markColumn(plot, column);
  }

  // The server's last word on what the page shows; the address says the same, so that it can be mailed.
  function showing(shown) {
    chosen = shown;
    if (shown.address) history.replaceState(null, '', shown.address);
    document.title = shown.trace ? `${shown.trace} · ReplayScope` : 'ReplayScope';
    for (const root of document.querySelectorAll('.rs-figure:not([hidden])')) {
      figures.mark(root.querySelector('.rs-plot'), markOf(root));
    }
    markToken();
    showLate();
    document.body.classList.remove('rs-waiting');
  }

  function openTab(name) {
    document.body.dataset.tab = name;
    for (const button of document.querySelectorAll('.rs-nav [role=tab]')) {
      const open = button.dataset.tab === name;
      button.setAttribute('aria-selected', open);
      button.tabIndex = open ? 0 : -1;
      if (open) button.scrollIntoView({ block: 'nearest', inline: 'nearest' });
    }
  }
  // Clicks and arrow keys on the tabs; `act` tells the server.
  function navigate(element, act) {
    const go = (button) => {
      if (!button || button.dataset.tab === document.body.dataset.tab) return;
      document.body.classList.add('rs-waiting');
      openTab(button.dataset.tab);
      button.focus();
      act(button.dataset.tab);
    };
    element.addEventListener('click', (event) => go(event.target.closest('[role=tab]')));
    element.addEventListener('keydown', (event) => {
      const step = { ArrowRight: 'nextElementSibling', ArrowLeft: 'previousElementSibling' }[event.key];
      if (step) go(event.target[step]);
    });
  }

  // The system's choice until the reader makes one, which this browser remembers.
  function chooseMode() {
    const dark = !document.body.classList.contains('dark');
    localStorage.setItem('replayscope-mode', dark ? 'dark' : 'light');
    figures.setMode(dark);
  }
  function startMode() {
    const kept = localStorage.getItem('replayscope-mode');
    figures.setMode(kept ? kept === 'dark' : wanted.matches);
  }
  wanted.addEventListener('change', startMode);
  if (document.body) startMode(); else document.addEventListener('DOMContentLoaded', startMode);

  return { place, clicked, follow, showing, openTab, navigate, choosesTokens, markToken, late, showLate, chooseMode };
})());
