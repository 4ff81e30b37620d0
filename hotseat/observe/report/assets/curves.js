// Learning curves: any metric of any run, smoothed, by step or by time.

const PREFERRED = [
  'reward',
  'eval/accuracy',
  'eval/loss',
  'loss',
  'explained_variance',
  'length',
  'entropy',
  'kl',
  'grad_norm',
  'engine_gap',
  'learning_rate',
];
const NUM_FIRST_SHOWN = 6;
const view = { smoothing: 0.6, x: 'steps', hidden: new Set(), shown: [] };

/** [x, value] pairs of a metric: means, or the highest values, which are the same where nothing was thinned. */
function seriesOf(run, name, x = 'steps', which = 'mean') {
  const points = run.curves.series[name];
  if (!points) return [];
  const values = points[which] ?? points.mean;
  return run.curves.grids[points.grid][x].map((position, index) => [position, values[index]]);
}

/** Exponential moving average; divided by the sum of its weights, or the first values would pull it towards zero. */
function smooth(points, weight) {
  let sum = 0;
  let total = 0;
  return points.map(([x, value]) => {
    if (value === null) return [x, null];
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return [x, sum / total];
  });
}

function metricNames() {
  return [...new Set(runs.flatMap((run) => Object.keys(run.curves.series)))];
}

function isMeasured(name) {
  return name.startsWith('eval/');
}

function showCurves() {
  const body = openSection(
    'curves',
    'Learning curves',
    'Faint: as measured. Bold: smoothed. Dots: measured on held-out prompts.',
  );
  const names = metricNames();
  if (!names.length) {
    body.append(absent('There are no metrics yet: metrics.jsonl is missing or empty.'));
    return;
  }
  const preferred = PREFERRED.filter((name) => names.includes(name));
  view.shown = (preferred.length ? preferred : names).slice(0, NUM_FIRST_SHOWN);
  const cards = el('div', { class: 'cards' });
  const fill = () => fillCurveCards(cards);
  body.append(
    curveControls(),
    el('div', { class: 'with-side' }, metricPicker(names, fill), el('div', {}, cards, curveNotes())),
  );
  fill();
}

function curveControls() {
  const shown = el('output', { for: 'smoothing' }, view.smoothing.toFixed(2));
  const slider = el('input', {
    id: 'smoothing',
    type: 'range',
    min: 0,
    max: 0.99,
    step: 0.01,
    value: view.smoothing,
    'aria-label': 'Smoothing',
    oninput: () => {
      view.smoothing = Number(slider.value);
      shown.textContent = view.smoothing.toFixed(2);
      redrawCurves();
    },
  });
  const controls = el(
    'div',
    { class: 'controls' },
    el('label', { class: 'field' }, el('span', {}, 'Smoothing'), slider, shown),
  );
  if (runs.some((run) => run.curves.grids.some((grid) => grid.seconds))) {
    controls.append(
      choice(
        'Horizontal axis',
        [
          ['steps', 'Steps'],
          ['seconds', 'Time'],
        ],
        view.x,
        (value) => {
          view.x = value;
          redrawCurves();
        },
      ),
    );
  }
  if (isComparison) controls.append(runLegend());
  controls.append(el('span', { class: 'hint' }, 'Ctrl + wheel zooms, dragging pans, double click resets'));
  return controls;
}

/** Which colour is which run; a run that is unticked is not drawn. */
function runLegend() {
  const entries = runs.map((run, index) => {
    const box = el('input', {
      type: 'checkbox',
      checked: true,
      onchange: () => {
        if (box.checked) view.hidden.delete(index);
        else view.hidden.add(index);
        redrawCurves();
      },
    });
    return el('label', { class: 'run-key' }, box, swatchOfRun(index), run.label);
  });
  return el('div', { class: 'run-keys', role: 'group', 'aria-label': 'Runs' }, ...entries);
}

function swatchOfRun(index) {
  return swatch(`var(--run-${index % RUN_COLOURS})`);
}

function redrawCurves() {
  for (const chart of charts) if (chart.isCurve) draw(chart);
}

function curveNotes() {
  const surplus = runs.filter((run) => run.curves.num_left_out);
  return notes(
    thinningNote(),
    timelessNote(),
    changesNote(),
    ...surplus.map(
      ({ label, curves }) => `${label}: ${plural(curves.num_left_out, 'metric')} left out for lack of room.`,
    ),
  );
}

function thinningNote() {
  const thinned = runs.find((run) => Object.values(run.curves.series).some((points) => points.low));
  if (!thinned) return null;
  const grid = thinned.curves.grids.reduce((most, other) => (other.num_steps > most.num_steps ? other : most));
  return (
    `${plural(grid.num_steps, 'step')} are drawn as ${plural(grid.steps.length, 'point')}: each is the mean of its ` +
    'neighbours, and the band reaches from their lowest to their highest value.'
  );
}

function changesNote() {
  const changed = runs.filter((run) => run.changes.length);
  if (!changed.length) return null;
  return 'Dashed lines: settings were changed there when the run was resumed. Setup lists them.';
}

function timelessNote() {
  const timeless = runs.filter((run) => run.curves.grids.some((grid) => !grid.seconds));
  if (!timeless.length || timeless.length === runs.length) return null;
  return `Without step_s, and so not drawn by time: ${timeless.map((run) => run.label).join(', ')}.`;
}

// --- picking metrics ---

function prefixOf(name) {
  return name.includes('/') ? name.slice(0, name.indexOf('/')) : '';
}

function metricPicker(names, onChange) {
  const groups = new Map();
  for (const name of [...names].sort()) {
    const prefix = prefixOf(name);
    groups.set(prefix, [...(groups.get(prefix) ?? []), name]);
  }
  const lists = [...groups]
    .sort(([a], [b]) => a.localeCompare(b))
    .map(([prefix, members]) => metricGroup(prefix, members, onChange));
  const search = el('input', {
    type: 'search',
    placeholder: 'Find a metric',
    'aria-label': 'Find a metric',
    oninput: () => filterMetrics(lists, search.value),
  });
  return el('aside', { class: 'picker', 'aria-label': 'Metrics to show' }, search, ...lists);
}

function metricGroup(prefix, names, onChange) {
  const rows = names.map((name) => {
    const box = el('input', {
      type: 'checkbox',
      'data-metric': name,
      onchange: () => {
        view.shown = box.checked ? [...view.shown, name] : view.shown.filter((other) => other !== name);
        onChange();
      },
    });
    box.checked = view.shown.includes(name);
    return el('label', { class: 'metric', title: name }, box, prefix ? name.slice(prefix.length + 1) : name);
  });
  const summary = el('summary', {}, prefix || 'training', el('span', { class: 'count' }, String(names.length)));
  const isOpen = !prefix || prefix === 'eval' || names.some((name) => view.shown.includes(name));
  return el('details', { open: isOpen }, summary, ...rows);
}

function filterMetrics(lists, text) {
  const wanted = text.trim().toLowerCase();
  for (const list of lists) {
    let numLeft = 0;
    for (const row of list.querySelectorAll('.metric')) {
      row.hidden = !row.title.toLowerCase().includes(wanted);
      numLeft += row.hidden ? 0 : 1;
    }
    list.hidden = numLeft === 0;
    if (wanted) list.open = true;
  }
}

// --- drawing ---

/** Cards that stay keep their charts, and with them their zoom. */
function fillCurveCards(cards) {
  for (const card of [...cards.children]) {
    if (view.shown.includes(card.dataset.metric)) continue;
    removeChartsIn(card);
    card.remove();
  }
  const present = new Set([...cards.children].map((card) => card.dataset.metric));
  for (const name of view.shown) if (!present.has(name)) cards.append(curveCard(name));
}

function curveCard(name) {
  const container = el('div');
  const notFinite = runs.reduce((sum, run) => sum + (run.curves.series[name]?.not_finite ?? 0), 0);
  const widen = el(
    'button',
    {
      type: 'button',
      class: 'quiet',
      'aria-pressed': 'false',
      onclick: () => widen.setAttribute('aria-pressed', String(card.classList.toggle('wide'))),
    },
    'Widen',
  );
  const card = el(
    'article',
    { class: 'card', 'data-metric': name },
    el(
      'div',
      { class: 'card-head' },
      el('h3', {}, name),
      notFinite ? el('span', { class: 'warn' }, `${plural(notFinite, 'value')} not finite`) : null,
      widen,
    ),
    container,
  );
  addCurveChart(container, `Curve of ${name}`, () => runs.map((run, index) => [run, index]), name);
  return card;
}

/** `pickRuns` gives [run, index] pairs: all of them, or the one that a section is about. */
function addCurveChart(container, label, pickRuns, name) {
  const chart = addChart(container, label, () =>
    curveOption(
      pickRuns().filter(([, index]) => !view.hidden.has(index)),
      name,
    ),
  );
  chart.isCurve = true;
  chart.onReady = (instance) =>
    instance.getZr().on('dblclick', () => instance.dispatchAction({ type: 'dataZoom', start: 0, end: 100 }));
  return chart;
}

function curveOption(picked, name) {
  const isTime = view.x === 'seconds';
  const usable = picked.filter(([run]) => !isTime || run.curves.grids.every((grid) => grid.seconds));
  const series = usable.flatMap(([run, index]) =>
    withChanges(run, index, [
      ...lines(run, index, name),
      ...(isMeasured(name) ? [] : marks(run, index, `eval/${name}`, 'dotted')),
    ]),
  );
  return {
    xAxis: stepAxis(isTime ? formatSeconds : undefined),
    yAxis: axis({ type: 'value', scale: true, splitNumber: 4, axisLabel: { formatter: formatNumber } }),
    dataZoom: [zoom()],
    tooltip: tooltip('axis', (parameters) => curveTooltip(parameters, name)),
    series,
  };
}

/** A dashed line, at the last of a run's series, where settings were changed when the run was resumed. */
function withChanges(run, index, series) {
  const places = [...new Set(run.changes.map((change) => (view.x === 'seconds' ? change.seconds : change.step)))];
  const shown = places.filter((place) => place !== null);
  if (!series.length || !shown.length) return series;
  const markLine = {
    silent: true,
    symbol: 'none',
    animation: false,
    label: { show: false },
    lineStyle: { color: isComparison ? runColour(index) : colour('muted'), type: 'dashed', width: 1 },
    data: shown.map((place) => ({ xAxis: place })),
  };
  return [...series.slice(0, -1), { ...series[series.length - 1], markLine }];
}

function lines(run, index, name) {
  if (isMeasured(name)) return marks(run, index, name);
  const points = seriesOf(run, name, view.x);
  if (!points.length) return [];
  const ink = runColour(index);
  const dash = index < RUN_COLOURS ? 'solid' : 'dashed';
  const common = { type: 'line', showSymbol: points.length === 1, emphasis: { disabled: true } };
  const bold = {
    ...common,
    id: `bold ${index}`,
    data: view.smoothing ? smooth(points, view.smoothing) : points,
    lineStyle: { color: ink, width: 2, type: dash },
    itemStyle: { color: ink },
  };
  const band = run.curves.series[name].low ? [bandSeries(run, index, name, ink)] : [];
  if (!view.smoothing) return [...band, bold];
  const faint = {
    ...common,
    id: `faint ${index}`,
    data: points,
    silent: true,
    lineStyle: { color: ink, width: 1, opacity: 0.3 },
    itemStyle: { color: ink, opacity: 0.3 },
  };
  return [...band, faint, bold];
}

/** From the lowest to the highest of the values that a point stands for, as one polygon. */
function bandSeries(run, index, name, ink) {
  const { low, high, grid } = run.curves.series[name];
  const xs = run.curves.grids[grid][view.x];
  const rows = xs.map((x, at) => [x, low[at], high[at]]).filter((row) => row[1] !== null);
  return {
    type: 'custom',
    id: `band ${index}`,
    silent: true,
    clip: true,
    data: rows,
    encode: { x: 0, y: [1, 2] },
    renderItem: (parameters, api) => {
      if (parameters.dataIndex) return null;
      const upper = rows.map((row) => api.coord([row[0], row[2]]));
      const lower = rows.map((row) => api.coord([row[0], row[1]])).reverse();
      return { type: 'polygon', shape: { points: [...upper, ...lower] }, style: { fill: ink, opacity: 0.14 } };
    },
  };
}

/** Values measured now and then: each is a dot. */
function marks(run, index, name, lineType = index < RUN_COLOURS ? 'solid' : 'dashed') {
  const points = seriesOf(run, name, view.x);
  if (!points.length) return [];
  const ink = runColour(index);
  return [
    {
      type: 'line',
      id: `mark ${index}`,
      data: points,
      connectNulls: true,
      showSymbol: points.length <= 150,
      emphasis: { disabled: true },
      symbol: 'circle',
      symbolSize: 7,
      itemStyle: { color: colour('card'), borderColor: ink, borderWidth: 2 },
      lineStyle: { color: ink, width: 1.5, type: lineType },
      z: 3,
    },
  ];
}

function curveTooltip(parameters, name) {
  const shown = parameters.filter(({ seriesId, value }) => !seriesId.startsWith('band') && value[1] !== null);
  const x = parameters[0].axisValue;
  const title = view.x === 'seconds' ? `after ${formatSeconds(x)}` : `step ${x.toLocaleString('en-US')}`;
  const rows = shown.map(({ seriesId, value }) => {
    const [kind, index] = seriesId.split(' ');
    const label = isComparison ? runs[Number(index)].label : name;
    const suffix = { faint: 'measured', mark: 'held out', bold: view.smoothing ? 'smoothed' : 'measured' }[kind];
    return [runColour(Number(index)), `${label}, ${suffix}`, formatNumber(value[1])];
  });
  return tooltipContent(title, rows);
}
