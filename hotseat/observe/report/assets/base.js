// What every section uses: elements, numbers as text, and which run is looked at.
// Text of a run reaches the page through textContent only: a model may have written it.

const data = JSON.parse(document.getElementById('data').textContent);
const runs = data.runs;
const isComparison = runs.length > 1;
const selection = { run: 0, listeners: [] };

/** An element with attributes, listeners (`onclick: ...`) and children, which are elements or texts. */
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? '' : String(value));
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function option(value, text, isSelected = false) {
  const made = el('option', { value }, text);
  made.selected = isSelected;
  return made;
}

/** A labelled form control. */
function field(text, control) {
  return el('label', { class: 'field' }, el('span', {}, text), control);
}

function absent(text) {
  return el('p', { class: 'absent' }, text);
}

/** What a section left out, a sentence each; null for what does not apply. */
function notes(...sentences) {
  return el('div', { class: 'notes' }, ...sentences.filter(Boolean).map((text) => el('p', {}, text)));
}

function table(head, rows, attributes = {}) {
  const headRow = el('tr', {}, ...head.map((text) => el('th', { scope: 'col' }, text)));
  const bodyRows = rows.map((cells) => el('tr', {}, ...cells.map(tableCell)));
  return el(
    'div',
    { class: 'scroll' },
    el('table', attributes, el('thead', {}, headRow), el('tbody', {}, ...bodyRows)),
  );
}

function tableCell(cell, index) {
  const made = index === 0 ? el('th', { scope: 'row' }) : el('td');
  made.append(cell instanceof Node ? cell : String(cell ?? ''));
  return made;
}

/** Buttons of which one is pressed. */
function choice(label, options, chosen, onChoose) {
  const buttons = options.map(([value, text]) =>
    el(
      'button',
      { type: 'button', 'data-value': value, 'aria-pressed': String(value === chosen), onclick: () => press(value) },
      text,
    ),
  );
  function press(value) {
    for (const button of buttons) button.setAttribute('aria-pressed', String(button.dataset.value === value));
    onChoose(value);
  }
  return el('div', { class: 'choice', role: 'group', 'aria-label': label }, ...buttons);
}

// --- the run that sections on a single run show ---

function onRun(listener) {
  selection.listeners.push(listener);
}

function selectRun(index) {
  selection.run = index;
  for (const select of document.querySelectorAll('select.run')) select.value = String(index);
  for (const listener of selection.listeners) listener(runs[index]);
}

function runSelect() {
  if (!isComparison) return null;
  const select = el(
    'select',
    { class: 'run', onchange: () => selectRun(Number(select.value)) },
    ...runs.map((run, index) => option(index, run.label, index === selection.run)),
  );
  return field('Run', select);
}

/** Heading of a section, and an element for what it shows. */
function openSection(id, title, explanation, { hasRunSelect = false } = {}) {
  const body = el('div', { class: 'body' });
  const heading = el('div', { class: 'heading' }, el('h2', {}, title), el('p', {}, explanation));
  if (hasRunSelect && isComparison) heading.append(runSelect());
  document.getElementById(id).replaceChildren(heading, body);
  document.getElementById(id).setAttribute('aria-label', title);
  return body;
}

// --- numbers as text ---

function formatNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return 'none';
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace('-', '\u2212').replace('e+', 'e');
  if (size >= 1000) return minus(Math.round(value).toLocaleString('en-US'));
  return minus(String(Number(value.toPrecision(4))));
}

function minus(text) {
  return text.replace(/^-/, '\u2212');
}

function formatShort(value) {
  return formatNumber(Number(value.toPrecision(2)));
}

function formatSigned(value) {
  return value > 0 ? `+${formatNumber(value)}` : formatNumber(value);
}

function formatBytes(count) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let index = 0;
  while (count >= 1024 && index < units.length - 1) {
    count /= 1024;
    index += 1;
  }
  return `${count >= 100 || index === 0 ? Math.round(count) : count.toFixed(count >= 10 ? 1 : 2)} ${units[index]}`;
}

function formatSeconds(seconds) {
  if (seconds >= 5400) return `${(seconds / 3600).toFixed(1)} h`;
  if (seconds >= 100) return `${(seconds / 60).toFixed(1)} min`;
  if (seconds >= 1) return `${Number(seconds.toPrecision(3))} s`;
  if (seconds >= 1e-3) return `${Number((seconds * 1e3).toPrecision(3))} ms`;
  return seconds === 0 ? '0' : `${Math.round(seconds * 1e6)} \u00b5s`;
}

function formatShare(share) {
  return `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;
}

function formatRange([first, last]) {
  return first === last ? String(first) : `${first}\u2013${last}`;
}

function plural(count, word) {
  return `${count.toLocaleString('en-US')} ${word}${count === 1 ? '' : 's'}`;
}
