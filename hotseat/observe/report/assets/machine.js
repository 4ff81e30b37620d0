// How much of the driver's machine was in use, over the time of the whole run.

function showMachine() {
  const body = openSection(
    'machine',
    'Machine',
    "Use of the driver's machine and its GPUs, by this run or others, over the time since the run began.",
    { hasRunSelect: true },
  );
  perRun(body, fillMachine);
}

function fillMachine(body, run) {
  if (!run.machine) {
    body.append(absent('The machine was not measured: there is no machine.jsonl.'));
    return;
  }
  const cards = el('div', { class: 'cards' });
  body.append(cards);
  const { seconds, shares, gib } = run.machine;
  const known = [
    ['Share of the time in use', shares, formatShare, 1],
    ['Memory in use, GiB', gib, formatNumber, null],
  ].filter(([, series]) => Object.keys(series).length);
  for (const [title, series, format, most] of known) cards.append(machineCard(title, seconds, series, format, most));
}

function machineCard(title, seconds, series, format, most) {
  const container = el('div');
  addChart(container, `${title} over time`, () => ({
    xAxis: stepAxis(formatSeconds),
    yAxis: axis({ type: 'value', min: 0, max: most, interval: most && most / 4, splitNumber: 4, axisLabel: { formatter: format } }),
    dataZoom: [zoom()],
    tooltip: tooltip('axis', (parameters) =>
      tooltipContent(
        formatSeconds(parameters[0].value[0]),
        parameters.map(({ seriesName, value }) => [partColour(seriesName), partName(seriesName), format(value[1])]),
      ),
    ),
    series: Object.entries(series).map(([name, values]) => ({
      type: 'line',
      name,
      data: values.map((value, index) => [seconds[index], value]),
      showSymbol: false,
      lineStyle: { color: partColour(name), width: 2 },
      itemStyle: { color: partColour(name) },
    })),
  }));
  const names = el('ul', { class: 'legend' }, ...Object.keys(series).map((name) => el('li', {}, partLegend(name))));
  return el('article', { class: 'card' }, el('div', { class: 'card-head' }, el('h3', {}, title), names), container);
}

/** 'device 3' of 'device 3/busy'; what is not of a device is the host's. */
function partName(name) {
  if (name.startsWith('device ')) return name.split('/')[0];
  return name === 'cpu' ? 'processors' : 'host';
}

/** A device has the same colour in both charts, and the host another one than the first devices. */
function partVariable(name) {
  const device = /^device (\d+)/.exec(name);
  return device ? `run-${device[1] % RUN_COLOURS}` : 'muted';
}

function partColour(name) {
  return colour(partVariable(name));
}

function partLegend(name) {
  return el('span', { class: 'run-name' }, swatch(`var(--${partVariable(name)})`), partName(name));
}
