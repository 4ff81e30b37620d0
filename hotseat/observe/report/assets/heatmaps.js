// Distributions over time, and the gap between engine and trainer.

const GAP_METRICS = ['engine_gap', 'engine_gap_p99', 'engine_gap_max'];
const GAP_OF_LAG = 'engine_gap_lag_';

function showDistributions() {
  const body = openSection(
    'distributions',
    'Distributions over time',
    'How the rewards and lengths of all samples of a step are spread.',
    { hasRunSelect: true },
  );
  perRun(body, (target, run) => {
    const names = Object.keys(run.distributions).filter((name) => name !== 'engine_gap');
    if (!names.length) {
      target.append(absent('This run recorded no distributions: distributions.jsonl is missing or empty.'));
      return;
    }
    target.append(
      el('div', { class: 'cards' }, ...names.map((name) => heatmapCard(name, run.distributions[name], 'samples'))),
    );
  });
}

function showGap() {
  const body = openSection(
    'gap',
    'Log-prob gap between engine and trainer',
    'Distance between the log-prob that the engine sampled a token with and the one the trainer computes for it.' +
      ' Where rollout runs ahead, that of lag 0 is the mismatch of the two, that of larger lags is staleness.',
    { hasRunSelect: true },
  );
  perRun(body, fillGap);
}

function fillGap(body, run) {
  const ofLags = Object.keys(run.curves.series).filter((name) => name.startsWith(GAP_OF_LAG));
  const names = [...GAP_METRICS.filter((name) => run.curves.series[name]), ...ofLags.sort()];
  const spread = run.distributions.engine_gap;
  if (!names.length && !spread) {
    body.append(absent('This run measured no gap: its metrics have no engine_gap.'));
    return;
  }
  const cards = el('div', { class: 'cards' });
  body.append(cards);
  if (names.length) cards.append(gapCard(run, names));
  if (spread) cards.append(heatmapCard('engine_gap of recorded tokens', spread, 'tokens'));
}

function gapCard(run, names) {
  const container = el('div');
  const isLogarithmic = names.every((name) =>
    run.curves.series[name].mean.every((value) => value === null || value > 0),
  );
  const ink = (name) => runColour(names.indexOf(name));
  addChart(container, 'Gap between engine and trainer over steps', () => ({
    xAxis: stepAxis(),
    yAxis: axis({ type: isLogarithmic ? 'log' : 'value', scale: true, axisLabel: { formatter: formatNumber } }),
    dataZoom: [zoom()],
    tooltip: tooltip('axis', (parameters) =>
      tooltipContent(
        `step ${parameters[0].axisValue}`,
        parameters.map(({ seriesName, value }) => [ink(seriesName), seriesName, formatNumber(value[1])]),
      ),
    ),
    series: names.map((name) => ({
      type: 'line',
      name,
      data: seriesOf(run, name, 'steps', name.endsWith('_max') ? 'high' : 'mean'),
      showSymbol: false,
      lineStyle: { color: ink(name), width: 2 },
      itemStyle: { color: ink(name) },
    })),
  }));
  const keys = el(
    'ul',
    { class: 'legend' },
    ...names.map((name) => el('li', {}, swatchOfRun(names.indexOf(name)), name)),
  );
  return el(
    'article',
    { class: 'card' },
    el(
      'div',
      { class: 'card-head' },
      el('h3', {}, isLogarithmic ? 'Gap over steps, logarithmic' : 'Gap over steps'),
      keys,
    ),
    container,
  );
}

function heatmapCard(name, map, unit) {
  const container = el('div');
  addChart(container, `Heat map of ${name} over steps`, () => heatmapOption(map, unit));
  const joined = map.steps.some(([first, last]) => first !== last && map.steps.length >= 20)
    ? el('span', { class: 'hint' }, 'neighbouring steps joined')
    : null;
  return el('article', { class: 'card' }, el('div', { class: 'card-head' }, el('h3', {}, name), joined), container);
}

function rowLabels(map) {
  if (map.is_discrete) return map.rows.map(formatNumber);
  return map.rows.slice(0, -1).map((low, index) => `${formatNumber(low)} to ${formatNumber(map.rows[index + 1])}`);
}

/** Edges on whole pixels: between cells that end inside one, the background would shine through. */
function drawCell(parameters, api) {
  const [x, y] = api.coord([api.value(0), api.value(1)]);
  const [width, height] = api.size([1, 1]);
  const [left, right, top, bottom] = [x - width / 2, x + width / 2, y - height / 2, y + height / 2].map(Math.round);
  return {
    type: 'rect',
    shape: { x: left, y: top, width: right - left, height: bottom - top },
    style: { fill: api.visual('color') },
  };
}

function heatmapOption(map, unit) {
  const labels = rowLabels(map);
  const most = Math.max(...map.cells.map((cell) => cell[2]));
  return {
    grid: { left: 0, right: 6, top: 12, bottom: 34, outerBoundsMode: 'same', outerBoundsContain: 'axisLabel' },
    xAxis: axis({ type: 'category', data: map.steps.map(([first]) => String(first)), hasLines: false }),
    yAxis: axis({
      type: 'category',
      data: map.is_discrete ? labels : map.rows.slice(0, -1).map(formatShort),
      hasLines: false,
      axisLabel: { interval: Math.ceil(labels.length / 7) - 1 },
    }),
    visualMap: {
      dimension: 2,
      min: 0,
      max: most,
      calculable: false,
      orient: 'horizontal',
      right: 0,
      bottom: -4,
      itemWidth: 10,
      itemHeight: 110,
      text: [formatShare(most), `0% of ${unit}`],
      textStyle: { color: colour('muted'), fontSize: 11 },
      inRange: { color: [0, 1, 2, 3, 4].map((at) => colour(`heat-${at}`)) },
    },
    tooltip: tooltip('item', ({ data: [column, row, share] }) =>
      tooltipContent(`step ${formatRange(map.steps[column])}`, [
        [null, labels[row], `${formatShare(share)} of ${unit}`],
      ]),
    ),
    series: [{ type: 'custom', data: map.cells, encode: { x: 0, y: 1 }, renderItem: drawCell }],
  };
}
