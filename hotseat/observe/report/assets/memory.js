// Memory that the processes of each role held in each phase.

function showMemory() {
  const body = openSection(
    'memory',
    'Memory per phase',
    'GiB that the processes of a role held: on a GPU the most during the phase, on CPU at its end.',
    { hasRunSelect: true },
  );
  perRun(body, fillMemory);
}

function fillMemory(body, run) {
  const names = Object.keys(run.curves.series).filter((name) => /^memory\/[^/]+\/.+/.test(name));
  if (!names.length) {
    body.append(absent('This run measured no memory: its metrics have no memory/... values.'));
    return;
  }
  const cells = names.map((name) => {
    const [, phase, ...role] = name.split('/');
    return { name, phase, role: role.join('/'), peak: peakOf(run, name) };
  });
  const roles = [...new Set(cells.map((cell) => cell.role))];
  const cards = el('div', { class: 'cards' });
  body.append(el('div', { class: 'card' }, memoryTable(cells, roles)), cards);
  for (const role of roles)
    cards.append(
      memoryCard(
        run,
        role,
        cells.filter((cell) => cell.role === role),
      ),
    );
}

function peakOf(run, name) {
  const points = run.curves.series[name];
  return (points.high ?? points.mean).reduce((most, value) => (value === null ? most : Math.max(most, value)), 0);
}

function memoryTable(cells, roles) {
  const most = Math.max(...cells.map((cell) => cell.peak));
  const phases = [...new Set(cells.map((cell) => cell.phase))];
  const rows = phases.map((phase) => [
    phase,
    ...roles.map((role) =>
      memoryCell(
        cells.find((cell) => cell.phase === phase && cell.role === role),
        most,
      ),
    ),
  ]);
  return table(['Peak, GiB', ...roles], rows, { class: 'numbers compact' });
}

function memoryCell(cell, most) {
  if (!cell) return '\u2013';
  const made = el('span', { class: 'heat' }, cell.peak.toFixed(cell.peak >= 10 ? 1 : 2));
  made.style.setProperty('--heat', `${Math.round((60 * cell.peak) / (most || 1))}%`);
  return made;
}

function memoryCard(run, role, cells) {
  const container = el('div');
  addChart(container, `Memory of ${role} by phase over steps`, () => ({
    xAxis: stepAxis(),
    yAxis: axis({ type: 'value', min: 0, splitNumber: 4, axisLabel: { formatter: formatNumber } }),
    tooltip: tooltip('axis', (parameters) =>
      tooltipContent(
        `step ${parameters[0].axisValue}`,
        parameters.map(({ seriesName, value }) => [
          namedColour(seriesName),
          seriesName,
          `${formatNumber(value[1])} GiB`,
        ]),
      ),
    ),
    series: cells.map(({ name, phase }) => ({
      type: 'line',
      name: phase,
      data: seriesOf(run, name),
      showSymbol: false,
      lineStyle: { color: namedColour(phase), width: 2 },
      itemStyle: { color: namedColour(phase) },
    })),
  }));
  return el(
    'article',
    { class: 'card' },
    el('div', { class: 'card-head' }, el('h3', {}, role), phaseLegend(cells)),
    container,
  );
}

function phaseLegend(cells) {
  return el('ul', { class: 'legend' }, ...cells.map(({ phase }) => el('li', {}, phaseName(phase))));
}
