// The devices' timeline: who held what when, in a window of steps.

const ROW_HEIGHT = 22;
const MICRO = 1e6;
const FIRST_WINDOW = 3;

function showTimeline() {
  const body = openSection(
    'timeline',
    'Device timeline',
    'Phases, who holds each device, hand-overs between holders, and the calls of each process.',
    { hasRunSelect: true },
  );
  perRun(body, fillTimeline);
}

function fillTimeline(body, run) {
  const timeline = run.timeline;
  if (!timeline) {
    body.append(absent('This run has no timeline: timeline.json is missing, or holds no step.'));
    return;
  }
  const lanes = layOut(timeline);
  const container = el('div');
  const summary = el('div');
  const last = timeline.windows.length - 1;
  const range = { from: Math.max(0, last - FIRST_WINDOW + 1), to: last };
  const chart = addChart(container, 'Timeline of phases, devices and processes', () =>
    timelineOption(timeline, lanes, range),
  );
  container.style.height = `${lanes.numRows * ROW_HEIGHT + 96}px`;
  const onRange = () => {
    draw(chart);
    summary.replaceChildren(deviceSummary(timeline, range));
  };
  body.append(
    el(
      'div',
      { class: 'card' },
      timelineControls(timeline, range, onRange),
      timelineLegend(timeline),
      el('div', { class: 'lanes' }, container),
      summary,
    ),
    timelineNotes(timeline),
  );
  onRange();
}

/** Rows for each lane: a span inside another, such as a hand-over inside a lease, goes one row down. */
function layOut(timeline) {
  const rowsOf = timeline.lanes.map(() => []);
  const placed = timeline.spans.map(([lane, , start, duration]) => {
    const ends = rowsOf[lane];
    let row = ends.findIndex((end) => end <= start);
    if (row < 0) row = ends.length;
    ends[row] = start + duration;
    return row;
  });
  const firstRow = [];
  let numRows = 0;
  for (const ends of rowsOf) {
    firstRow.push(numRows);
    numRows += ends.length;
  }
  const labels = Array.from({ length: numRows }, () => '');
  timeline.lanes.forEach(([process, thread], lane) => {
    labels[firstRow[lane]] = thread || process;
  });
  const rows = timeline.spans.map(([lane], index) => firstRow[lane] + placed[index]);
  return { rows, labels, numRows, borders: firstRow };
}

function timelineControls(timeline, range, onRange) {
  const options = () =>
    timeline.windows.map((window, index) =>
      option(index, `step ${window.step}${window.is_slowest ? ' (slowest)' : ''}`),
    );
  const from = el(
    'select',
    { 'aria-label': 'First step', onchange: () => set(Number(from.value), Math.max(Number(from.value), range.to)) },
    ...options(),
  );
  const to = el(
    'select',
    { 'aria-label': 'Last step', onchange: () => set(Math.min(range.from, Number(to.value)), Number(to.value), false) },
    ...options(),
  );
  const last = timeline.windows.length - 1;
  function set(first, final, keepsFirst = true) {
    // Steps that are not neighbours in the run have empty hours between them.
    while (timeline.windows[final].index - timeline.windows[first].index > final - first) {
      if (keepsFirst) final -= 1;
      else first += 1;
    }
    Object.assign(range, { from: first, to: final });
    from.value = String(first);
    to.value = String(final);
    onRange();
  }
  const jump = (text, first, final) =>
    el('button', { type: 'button', class: 'button', onclick: () => set(first, final) }, text);
  const move = (by) => () => {
    const width = range.to - range.from;
    const first = Math.min(Math.max(0, range.from + by * (width + 1)), last - width);
    set(first, first + width);
  };
  const slowest = timeline.windows.findIndex((window) => window.is_slowest);
  from.value = String(range.from);
  to.value = String(range.to);
  return el(
    'div',
    { class: 'controls' },
    field('Steps', from),
    field('to', to),
    el('button', { type: 'button', class: 'button', 'aria-label': 'Earlier steps', onclick: move(-1) }, '\u2190'),
    el('button', { type: 'button', class: 'button', 'aria-label': 'Later steps', onclick: move(1) }, '\u2192'),
    jump('First', 0, Math.min(last, FIRST_WINDOW - 1)),
    slowest >= 0 ? jump('Slowest', slowest, slowest) : null,
    jump('Newest', Math.max(0, last - FIRST_WINDOW + 1), last),
    el('span', { class: 'hint' }, 'Ctrl + wheel or the bar below zooms, dragging pans'),
  );
}

/** Names that share a colour, as a role and the phase it works in, share an entry. */
function timelineLegend(timeline) {
  const seen = { phases: new Set(), devices: new Set() };
  for (const [lane, name, , , isHandOver] of timeline.spans) {
    if (!isHandOver) seen[timeline.lanes[lane][0]]?.add(timeline.names[name]);
  }
  const byColour = new Map();
  for (const name of new Set([...seen.phases, ...seen.devices])) {
    const variable = colourVariable(name);
    byColour.set(variable, [...(byColour.get(variable) ?? []), name]);
  }
  const entries = [...byColour].map(([variable, names]) => [`var(--${variable})`, names.join(', ')]);
  return legend([...entries, ['var(--hand-over)', 'hand-over']]);
}

function spanColour(timeline, [lane, name, , , isHandOver]) {
  if (isHandOver) return colour('hand-over');
  const process = timeline.lanes[lane][0];
  const isNamed = process === 'phases' || process === 'devices';
  return namedColour(isNamed ? timeline.names[name] : process);
}

function timelineOption(timeline, lanes, range) {
  const start = timeline.windows[range.from].start;
  const end = timeline.windows[range.to].end;
  const shown = timeline.spans
    .map((span, index) => ({ span, row: lanes.rows[index] }))
    .filter(({ span }) => span[2] < end && span[2] + span[3] > start);
  const borders = new Set(lanes.borders);
  return {
    grid: { left: 0, right: 14, top: 26, bottom: 44, outerBoundsMode: 'same', outerBoundsContain: 'axisLabel' },
    xAxis: axis({
      type: 'value',
      min: 0,
      max: (end - start) / MICRO,
      position: 'top',
      axisLabel: { formatter: formatSeconds },
    }),
    yAxis: axis({
      type: 'category',
      inverse: true,
      data: lanes.labels,
      axisLabel: { interval: 0, fontSize: 12, hideOverlap: false },
      splitLine: {
        show: true,
        interval: (index) => borders.has(index + 1),
        lineStyle: { color: colour('line-strong') },
      },
    }),
    dataZoom: [zoom({ xAxisIndex: 0 }), zoomBar()],
    tooltip: tooltip('item', ({ data: [index] }) => spanTooltip(timeline, shown[index].span)),
    series: [
      {
        type: 'custom',
        clip: true,
        encode: { x: [1, 2], y: 3 },
        data: shown.map(({ span, row }, index) => [
          index,
          (span[2] - start) / MICRO,
          (span[2] + span[3] - start) / MICRO,
          row,
        ]),
        renderItem: (parameters, api) => drawSpan(parameters, api, timeline, shown),
      },
    ],
  };
}

function zoomBar() {
  return {
    type: 'slider',
    height: 18,
    bottom: 8,
    showDetail: false,
    showDataShadow: false,
    brushSelect: false,
    filterMode: 'none',
    borderColor: colour('line'),
    fillerColor: colour('filler'),
    handleStyle: { color: colour('card'), borderColor: colour('muted') },
    moveHandleStyle: { color: colour('line-strong') },
    backgroundColor: 'transparent',
  };
}

function drawSpan(parameters, api, timeline, shown) {
  const { span } = shown[api.value(0)];
  const [left, middle] = api.coord([api.value(1), api.value(3)]);
  const [right] = api.coord([api.value(2), api.value(3)]);
  const height = ROW_HEIGHT - 4;
  const { coordSys } = parameters;
  const bounds = { x: left, y: middle - height / 2, width: Math.max(right - left, 1), height };
  const shape = echarts.graphic.clipRectByRect(bounds, {
    x: coordSys.x,
    y: coordSys.y,
    width: coordSys.width,
    height: coordSys.height,
  });
  if (!shape) return null;
  const fill = spanColour(timeline, span);
  return {
    type: 'rect',
    shape: { ...shape, r: 2 },
    style: { fill, opacity: 0.92 },
    textContent:
      shape.width > 40
        ? {
            style: {
              text: timeline.names[span[1]],
              fill: readableOn(fill),
              fontSize: 11,
              width: shape.width - 8,
              overflow: 'truncate',
            },
          }
        : undefined,
    textConfig: { position: 'insideLeft', distance: 5 },
  };
}

function readableOn(hex) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue > 140 ? '#14181d' : '#ffffff';
}

function spanTooltip(timeline, [lane, name, start, duration, isHandOver, bytes]) {
  const rows = [
    [null, 'lane', timeline.lanes[lane][1]],
    [null, 'takes', formatSeconds(duration / MICRO)],
    [null, 'begins', new Date((timeline.origin + start / MICRO) * 1000).toLocaleString()],
  ];
  if (bytes !== undefined) {
    rows.push([null, 'moves', formatBytes(bytes)]);
    if (duration) rows.push([null, 'rate', `${formatBytes((bytes / duration) * MICRO)}/s`]);
  }
  return tooltipContent(isHandOver ? `${timeline.names[name]} (hand-over)` : timeline.names[name], rows);
}

/** How much of the window each device was held, and what its hand-overs cost. */
function deviceSummary(timeline, range) {
  const start = timeline.windows[range.from].start;
  const end = timeline.windows[range.to].end;
  const rows = timeline.lanes.flatMap(([process, thread], lane) => {
    if (process !== 'devices') return [];
    const mine = timeline.spans.filter((span) => span[0] === lane && span[2] < end && span[2] + span[3] > start);
    const handOvers = mine.filter((span) => span[4]);
    const held =
      covered(
        mine.filter((span) => !span[4]),
        start,
        end,
      ) /
      (end - start);
    const handing = covered(handOvers, start, end) / (end - start);
    const bytes = handOvers.reduce((sum, span) => sum + (span[5] ?? 0), 0);
    return [
      [
        thread,
        formatShare(held),
        formatShare(handing),
        String(handOvers.length),
        bytes ? formatBytes(bytes) : '\u2013',
      ],
    ];
  });
  if (!rows.length) return el('div');
  return table(['Device', 'Held', 'In hand-overs', 'Hand-overs', 'Moved'], rows, { class: 'numbers compact' });
}

/** Time that at least one of the spans, which begin in order, covers. */
function covered(spans, start, end) {
  let sum = 0;
  let reached = start;
  for (const [, , begin, duration] of spans) {
    const from = Math.max(begin, reached);
    const to = Math.min(begin + duration, end);
    if (to > from) {
      sum += to - from;
      reached = to;
    }
  }
  return sum;
}

function timelineNotes(timeline) {
  const { windows, num_windows: numWindows, num_left_out: numLeftOut } = timeline;
  const which = `${windows.length} of ${plural(numWindows, 'step')} are here: the first, the slowest and the newest.`;
  return notes(
    windows.length < numWindows ? `${which} timeline.json has all of them and opens in Perfetto.` : null,
    numLeftOut ? `${plural(numLeftOut, 'short span')} left out.` : null,
  );
}
