// Where the time of a step goes.

// Bars that are narrow show the seams between them; areas with steps do not.
const MAX_BARS = 80;
const BARS = { type: 'bar', barCategoryGap: '15%' };
const AREAS = { type: 'line', step: 'middle', showSymbol: false, lineStyle: { width: 0 }, areaStyle: { opacity: 1 } };

function showPhases() {
  const body = openSection('phases', 'Phase times', 'Seconds of each step by phase.', { hasRunSelect: true });
  perRun(body, fillPhases);
}

function fillPhases(body, run) {
  if (!run.phases) {
    body.append(absent('This run measured no phases: its metrics have no time/... values.'));
    return;
  }
  const container = el('div');
  const card = el('div', { class: 'card' }, container);
  body.append(el('div', { class: 'chart-and-table' }, card, el('div', { class: 'card' }, phaseTable(run.phases))));
  addChart(container, 'Seconds by phase over steps', () => phaseOption(run.phases));
  const width = Math.max(...run.phases.steps.map(([first, last]) => last - first + 1));
  body.append(notes(width > 1 ? `Each value is the mean of up to ${width} steps.` : null));
}

function phaseTable({ phases }) {
  const rows = [...phases]
    .sort((a, b) => b.total - a.total)
    .map((phase) => [phaseName(phase.name), formatSeconds(phase.mean), shareBar(phase), formatSeconds(phase.total)]);
  return table(['Phase', 'Mean', 'Share', 'Total'], rows, { class: 'numbers' });
}

function phaseName(name) {
  return el('span', { class: 'run-name' }, swatch(`var(--${colourVariable(name)})`), name);
}

function shareBar(phase) {
  const bar = el('span', { class: 'share-bar', 'aria-hidden': 'true' });
  bar.style.width = `${Math.max(1, 64 * phase.share)}px`;
  bar.style.background = `var(--${colourVariable(phase.name)})`;
  return el('span', { class: 'share' }, bar, formatShare(phase.share));
}

function phaseOption({ steps, phases }) {
  const areBars = steps.length <= MAX_BARS;
  return {
    xAxis: axis({
      type: 'category',
      data: steps.map(([first]) => String(first)),
      hasLines: false,
      boundaryGap: areBars,
    }),
    yAxis: axis({ type: 'value', splitNumber: 4, axisLabel: { formatter: formatSeconds } }),
    dataZoom: [zoom()],
    tooltip: tooltip('axis', (parameters) => phaseTooltip(parameters, steps, phases), {
      axisPointer: { type: areBars ? 'shadow' : 'line', lineStyle: { color: colour('ink') } },
    }),
    series: phases.map(({ name, seconds }) => ({ ...(areBars ? BARS : AREAS), ...phaseSeries(name, seconds) })),
  };
}

function phaseSeries(name, seconds) {
  return { stack: 'phases', name, data: seconds, color: namedColour(name), emphasis: { disabled: true } };
}

function phaseTooltip(parameters, steps, phases) {
  const at = parameters[0].dataIndex;
  const total = phases.reduce((sum, phase) => sum + (phase.seconds[at] ?? 0), 0);
  const rows = phases.map(({ name, seconds }) => [namedColour(name), name, formatSeconds(seconds[at] ?? 0)]);
  return tooltipContent(`step ${formatRange(steps[at])}: ${formatSeconds(total)}`, rows.reverse());
}
