// How the run was set up, and what it said.

function showSetup() {
  const body = openSection(
    'setup',
    'Setup and events',
    'The config as it was checked, the plan, and what the run said.',
    { hasRunSelect: true },
  );
  if (isComparison)
    body.append(el('div', { class: 'card' }, el('h3', {}, 'Where the configs differ'), configDifferences()));
  const own = el('div', { class: 'own' });
  body.append(own);
  perRun(own, fillSetup);
}

function fillSetup(body, run) {
  if (run.changes.length)
    body.append(el('div', { class: 'card' }, el('h3', {}, 'Changed when resumed'), changes(run.changes)));
  if (run.is_evaluation) {
    body.append(el('div', { class: 'card' }, el('h3', {}, 'Config'), config(run)));
    return;
  }
  body.append(
    el('div', { class: 'card' }, el('h3', {}, 'Events'), events(run)),
    el(
      'div',
      { class: 'two' },
      el('div', { class: 'card' }, el('h3', {}, 'Plan'), plan(run)),
      el('div', { class: 'card' }, el('h3', {}, 'Config'), config(run)),
    ),
  );
  if (run.counts?.reasons.length)
    body.append(el('div', { class: 'card' }, el('h3', {}, 'Samples that were not learned from'), reasons(run.counts)));
}

function configDifferences() {
  const all = runs.map((run) => run.config?.keys ?? {});
  const keys = [...new Set(all.flatMap(Object.keys))].sort();
  const rows = keys
    .filter((name) => new Set(all.map((values) => values[name])).size > 1)
    .map((name) => [
      name,
      ...all.map((values) => (values[name] === undefined ? el('span', { class: 'hint' }, 'default') : values[name])),
    ]);
  return rows.length
    ? table(['Key', ...runs.map((run) => run.label)], rows, { class: 'differences' })
    : absent('They are alike.');
}

function changes(found) {
  return table(
    ['From step', 'Key', 'Before', 'After', ''],
    found.map((change) => [
      change.step.toLocaleString('en-US'),
      change.key,
      change.from,
      change.to,
      change.is_allowed ? 'allowed: not as the run would have gone on' : '',
    ]),
    { class: 'changes' },
  );
}

function config(run) {
  if (!run.config) return absent('There is no config.yaml.');
  return el('pre', { class: 'yaml', tabindex: 0 }, run.config.text);
}

function reasons({ reasons: found }) {
  return table(
    ['State', 'Reason', 'Samples'],
    found.map(([state, reason, count]) => [state, reason, count.toLocaleString('en-US')]),
  );
}

// --- plan ---

function plan(run) {
  if (!run.plan) return absent('There is no plan.json, or it was written by another version.');
  const { label, verdict, roles, groups, warnings } = run.plan;
  return el(
    'div',
    {},
    el('p', {}, `Placement: ${label}. Memory: ${verdict}.`),
    table(
      ['Role', 'On', 'Processes', 'Tensor parallel'],
      roles.map((role) => [role.name, role.on, role.processes, role.tensor_parallel]),
    ),
    ...groups.map(planGroup),
    warnings.length ? el('ul', { class: 'warnings' }, ...warnings.map((text) => el('li', {}, text))) : null,
  );
}

function planGroup(group) {
  const size = group.devices.length;
  const names = group.devices.map((device) => device.join(':'));
  const devices = size === 1 ? `device ${names[0]}` : `devices ${names[0]} to ${names[size - 1]} (${size})`;
  const rows = group.steps.map((step) => [
    step.step,
    step.roles.join(', '),
    planMemory(step.used_gib, group.memory_gib),
  ]);
  const moves = group.hand_overs
    .filter((handOver) => handOver.leaves.length || handOver.comes.length)
    .map((handOver) => {
      const parts = [...handOver.leaves, ...handOver.comes].map(movedPart);
      return el('li', {}, `${handOver.from_step} to ${handOver.to_step}: ${parts.join('; ')}`);
    });
  return el(
    'div',
    {},
    el('h4', {}, `On ${devices}`),
    table(['Phase', 'Works', 'Planned memory'], rows),
    moves.length
      ? el('details', {}, el('summary', {}, `${plural(moves.length, 'hand-over')} per step`), el('ul', {}, ...moves))
      : null,
  );
}

function movedPart({ role, part, how, gib }) {
  return `${role} ${part} ${how}${gib === null ? '' : ` ${gib.toFixed(2)} GiB`}`;
}

function planMemory(used, all) {
  if (used === null) return 'unknown';
  return all === null ? `${used.toFixed(2)} GiB` : `${used.toFixed(1)} of ${all.toFixed(0)} GiB`;
}

// --- events ---

function events(run) {
  if (!run.events) return absent('There is no events.jsonl.');
  const { shown, counts } = run.events;
  const total = Object.values(counts).reduce((sum, count) => sum + count, 0);
  if (!total) return absent('The run said nothing.');
  const list = el('ol', { class: 'events' });
  const fill = (kind) =>
    list.replaceChildren(...shown.filter((event) => kind === 'all' || event.kind === kind).map(eventItem));
  const kinds = [
    ['all', `all (${total})`],
    ...Object.entries(counts).map(([kind, count]) => [kind, `${kind} (${count})`]),
  ];
  fill('all');
  const rest =
    shown.length < total
      ? el('p', { class: 'hint' }, `${shown.length} of ${total} are here; notes were the first to be left out.`)
      : null;
  return el('div', {}, choice('Kind of event', kinds, 'all', fill), list, rest);
}

function eventItem(event) {
  const time = event.time === null ? '' : new Date(event.time * 1000).toLocaleString();
  return el(
    'li',
    { class: `event kind-${['start', 'note', 'warning', 'fault', 'restart'].includes(event.kind) ? event.kind : 'note'}` },
    el('span', { class: 'badge' }, event.kind),
    el(
      'span',
      { class: 'event-when' },
      `${event.step === null || event.step === undefined ? '' : `step ${event.step}`}`,
    ),
    el('span', { class: 'event-text' }, event.text),
    el('time', {}, time),
  );
}
