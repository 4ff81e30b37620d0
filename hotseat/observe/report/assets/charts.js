// Charts in the colours of the page. All of them are drawn again when the theme changes.

const charts = new Set();
const resizing = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const chart = echarts.getInstanceByDom(target);
    if (chart && target.clientWidth) chart.resize();
  }
});

const approaching = new IntersectionObserver(
  (entries) => {
    const near = new Set(entries.filter((entry) => entry.isIntersecting).map((entry) => entry.target));
    for (const chart of charts) if (near.has(chart.container)) start(chart);
  },
  { rootMargin: '600px' },
);

const RUN_COLOURS = 8;
const KNOWN_COLOURS = {
  rollout: 'rollout',
  prepare: 'prepare',
  update: 'update',
  sync: 'sync',
  evaluate: 'evaluate',
  save: 'save',
  'between phases': 'rest',
  actor: 'update',
  reference: 'evaluate',
  critic: 'sync',
  reward: 'save',
};

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function runColour(index) {
  return colour(`run-${index % RUN_COLOURS}`);
}

/** Phases and roles have the same colour wherever they appear; others one that their name decides. */
function colourVariable(name) {
  const known = KNOWN_COLOURS[name];
  if (known) return `phase-${known}`;
  let sum = 0;
  for (const letter of name) sum = (sum * 31 + letter.codePointAt(0)) % 997;
  return `run-${sum % RUN_COLOURS}`;
}

function namedColour(name) {
  return colour(colourVariable(name));
}

/** A chart in `container`; `makeOption` is asked again whenever something it depends on has changed. */
function addChart(container, label, makeOption) {
  container.classList.add('chart');
  container.setAttribute('role', 'img');
  container.setAttribute('aria-label', label);
  const chart = { container, makeOption, instance: null };
  charts.add(chart);
  approaching.observe(container);
  return chart;
}

/** The first drawing: when the chart comes near the window, so that a page of many charts opens at once. */
function start(chart) {
  approaching.unobserve(chart.container);
  chart.instance = echarts.init(chart.container);
  resizing.observe(chart.container);
  draw(chart);
  chart.onReady?.(chart.instance);
}

function startAll() {
  for (const chart of charts) if (!chart.instance) start(chart);
}

function draw(chart) {
  chart.instance?.setOption({ ...commonOption(), ...chart.makeOption() }, { notMerge: true });
}

function removeChart(chart) {
  charts.delete(chart);
  approaching.unobserve(chart.container);
  resizing.unobserve(chart.container);
  chart.instance?.dispose();
}

function removeChartsIn(element) {
  for (const chart of [...charts]) if (element.contains(chart.container)) removeChart(chart);
}

function redrawAll() {
  for (const chart of charts) draw(chart);
}

function commonOption() {
  return {
    animation: false,
    textStyle: { fontFamily: getComputedStyle(document.body).fontFamily, color: colour('ink') },
    grid: { left: 0, right: 6, top: 16, bottom: 0, outerBoundsMode: 'same', outerBoundsContain: 'axisLabel' },
  };
}

function axis(more = {}) {
  return {
    axisLine: { show: false },
    axisTick: { show: false },
    axisLabel: { color: colour('muted'), fontSize: 11, hideOverlap: true, ...more.axisLabel },
    splitLine: { show: more.hasLines ?? true, lineStyle: { color: colour('line') } },
    splitArea: { show: false },
    nameTextStyle: { color: colour('muted'), fontSize: 11 },
    ...Object.fromEntries(Object.entries(more).filter(([name]) => !['axisLabel', 'hasLines'].includes(name))),
  };
}

/** Steps, or seconds, along the bottom, from the first to the last. */
function stepAxis(formatter) {
  const axisLabel = { formatter, alignMaxLabel: 'right' };
  return axis({ type: 'value', min: 'dataMin', max: 'dataMax', hasLines: false, axisLabel });
}

function tooltip(trigger, makeContent, more = {}) {
  return {
    trigger,
    confine: true,
    transitionDuration: 0,
    backgroundColor: colour('card'),
    borderColor: colour('line-strong'),
    padding: [8, 10],
    textStyle: { color: colour('ink'), fontSize: 12 },
    axisPointer: { type: 'line', lineStyle: { color: colour('line-strong') }, label: { show: false } },
    formatter: makeContent,
    ...more,
  };
}

/** What a tooltip holds: a title, and rows of colour, name and value. */
function tooltipContent(title, rows) {
  return el(
    'div',
    { class: 'tip' },
    el('strong', {}, title),
    ...rows.map(([rowColour, name, value]) =>
      el('div', { class: 'tip-row' }, swatch(rowColour), el('span', {}, name), el('b', {}, value)),
    ),
  );
}

function swatch(swatchColour) {
  const made = el('i', { class: 'swatch', 'aria-hidden': 'true' });
  made.style.background = swatchColour ?? 'transparent';
  return made;
}

function legend(entries) {
  return el(
    'ul',
    { class: 'legend' },
    ...entries.map(([entryColour, name]) => el('li', {}, swatch(entryColour), name)),
  );
}

/** Dragging pans and Ctrl with the wheel zooms; the wheel alone scrolls the page. */
function zoom(more = {}) {
  return {
    type: 'inside',
    zoomOnMouseWheel: 'ctrl',
    moveOnMouseWheel: false,
    preventDefaultMouseMove: false,
    filterMode: 'none',
    ...more,
  };
}

/** A section that is filled anew for each run that is selected. */
function perRun(body, fill) {
  onRun((run) => {
    removeChartsIn(body);
    body.replaceChildren();
    fill(body, run);
  });
}
