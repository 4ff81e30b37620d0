// The header: what was run, and its key figures.

function showOverview() {
  const section = document.getElementById('overview');
  const title = isComparison ? `${runs.length} runs side by side` : runs[0].label;
  document.title = `${title} \u2013 Hotseat report`;
  const intro = isComparison ? runs.map((run) => run.label).join(', ') : describeRun(runs[0]);
  section.append(el('p', { class: 'eyebrow' }, 'Report'), el('h1', {}, title), el('p', { class: 'intro' }, intro));
  section.append(isComparison ? comparison() : tiles(runs[0]));
}

function describeRun(run) {
  const keys = run.config?.keys ?? {};
  const parts = [
    run.task && `Task ${run.task}`,
    keys['actor.model'] && `model ${keys['actor.model'].split('/').filter(Boolean).slice(-2).join('/')}`,
    keys['algorithm.advantage'] && keys['algorithm.advantage'],
    run.plan?.label,
    run.has_model ? 'model exported' : 'no model exported so far',
  ];
  return parts.filter(Boolean).join(' \u00b7 ');
}

function tiles(run) {
  return el('div', { class: 'tiles' }, ...run.facts.map((fact) => tile(run, fact)));
}

function tile(run, fact) {
  const made = el(
    'div',
    { class: fact.is_headline ? 'tile headline' : 'tile' },
    el('span', { class: 'tile-label' }, fact.label),
    el('strong', { class: 'tile-value' }, fact.value),
    el('span', { class: 'tile-note' }, fact.note),
  );
  if (fact.is_headline) made.append(sparkline(seriesOf(run, fact.label)));
  return made;
}

function sparkline(points) {
  const width = 120;
  const height = 36;
  const known = points.filter(([, value]) => value !== null);
  const [low, high] = [Math.min(...known.map((point) => point[1])), Math.max(...known.map((point) => point[1]))];
  const span = known.length > 1 ? known[known.length - 1][0] - known[0][0] : 1;
  const path = known
    .map(([x, y], index) => {
      const left = 2 + ((width - 4) * (x - known[0][0])) / (span || 1);
      const top = 2 + (height - 4) * (1 - (y - low) / (high - low || 1));
      return `${index ? 'L' : 'M'}${left.toFixed(1)} ${top.toFixed(1)}`;
    })
    .join('');
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
  svg.setAttribute('class', 'spark');
  svg.setAttribute('aria-hidden', 'true');
  const line = document.createElementNS('http://www.w3.org/2000/svg', 'path');
  line.setAttribute('d', path);
  svg.append(line);
  return svg;
}

function comparison() {
  const labels = [...new Set(runs.flatMap((run) => run.facts.map((fact) => fact.label)))];
  const rows = runs.map((run, index) => {
    const name = el('span', { class: 'run-name' }, swatchOfRun(index), run.label);
    const cells = labels.map((label) => {
      const fact = run.facts.find((candidate) => candidate.label === label);
      if (!fact) return '\u2013';
      return el('span', {}, fact.value, fact.is_headline ? el('small', {}, fact.note) : null);
    });
    return [name, run.task ?? '\u2013', ...cells];
  });
  return el('div', { class: 'card' }, table(['Run', 'Task', ...labels], rows, { class: 'numbers' }));
}
