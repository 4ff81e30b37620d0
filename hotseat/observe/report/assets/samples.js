// The sample browser: find a sample, and see what is known of each of its tokens.

const LOG_PROB_UNIT = 1e-4;
const GAP_UNIT = 1e-5;
const MODES = {
  gap: {
    name: 'Log-prob gap',
    kind: 'diverging',
    of: (token) => token.gap,
    low: 'trainer less sure',
    high: 'more sure',
  },
  advantage: {
    name: 'Advantage',
    kind: 'diverging',
    of: (token) => token.advantage,
    low: 'discouraged',
    high: 'encouraged',
  },
  engine: {
    name: 'Engine log-prob',
    kind: 'sequential',
    of: (token) => (token.engine === null ? null : -token.engine),
    low: 'likely',
    high: 'unlikely',
  },
  version: { name: 'Weight version', kind: 'steps', of: (token) => token.version },
  fate: { name: 'Fate', kind: 'named', of: (token) => token.fate },
};
const FATES = ['learned', 'clipped', 'corrected', 'clipped, corrected', 'no gradient'];
const browser = { mode: 'gap', view: 'conversation', samples: [], shown: [], selected: null };

function showSamples() {
  const body = openSection(
    'samples',
    'Samples',
    'Recorded samples, token by token. Arrows up and down move through the list, left and right through tokens.',
    { hasRunSelect: true },
  );
  perRun(body, fillSamples);
}

function fillSamples(body, run) {
  if (!run.samples) {
    body.append(absent('This run recorded no samples: samples.jsonl is missing or empty.'));
    return;
  }
  browser.samples = run.samples.shown.map((sample, index) => ({ ...sample, index, words: wordsOf(sample) }));
  const list = el('ul', {
    class: 'sample-list',
    role: 'listbox',
    tabindex: 0,
    'aria-label': 'Samples',
    onkeydown: moveInList,
  });
  const detail = el('div', { class: 'sample-detail' });
  const count = el('span', { class: 'hint', id: 'sample-count', 'aria-live': 'polite' });
  const filters = sampleFilters(run, fillList);
  body.append(filters.element, el('div', { class: 'browser' }, el('div', { class: 'list-side' }, count, list), detail));
  const { shown, num_recorded: numRecorded } = run.samples;
  if (shown.length < numRecorded) {
    const which = `${shown.length} of ${plural(numRecorded, 'recorded sample')} are here, spread over the run`;
    body.append(notes(`${which}; samples.jsonl has all of them.`));
  }

  function fillList() {
    browser.shown = browser.samples.filter(filters.accepts);
    count.textContent = `${browser.shown.length} of ${plural(browser.samples.length, 'sample')}`;
    list.replaceChildren(...browser.shown.map((sample) => listItem(sample, () => select(sample))));
    select(browser.shown.includes(browser.selected) ? browser.selected : (browser.shown[0] ?? null));
  }

  function select(sample) {
    browser.selected = sample;
    for (const item of list.children) {
      const isSelected = sample !== null && item.id === `sample-${sample.index}`;
      item.setAttribute('aria-selected', String(isSelected));
      if (isSelected) keepInView(list, item);
    }
    if (sample === null) list.removeAttribute('aria-activedescendant');
    else list.setAttribute('aria-activedescendant', `sample-${sample.index}`);
    detail.replaceChildren(sample === null ? absent('No sample passes these filters.') : sampleDetail(sample));
  }

  function moveInList(event) {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by || !browser.shown.length) return;
    event.preventDefault();
    const at = browser.shown.indexOf(browser.selected) + by;
    select(browser.shown[Math.min(Math.max(at, 0), browser.shown.length - 1)]);
  }

  fillList();
}

/** Scrolls the list and not the page. */
function keepInView(list, item) {
  const top = item.offsetTop;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + item.offsetHeight > list.scrollTop + list.clientHeight)
    list.scrollTop = top + item.offsetHeight - list.clientHeight;
}

function wordsOf(sample) {
  const answer = sample.segments.map((segment) => segment.text.join('')).join('');
  return [sample.prompt_text, answer, sample.label ?? '', sample.reason].join('\n').toLowerCase();
}

// --- filters ---

function sampleFilters(run, onChange) {
  const distinct = (name) => [...new Set(run.samples.shown.map((sample) => sample[name]))];
  const number = (label) =>
    el('input', { type: 'number', step: 'any', 'aria-label': label, class: 'short', oninput: onChange });
  const select = (name, texts, label) =>
    el(
      'select',
      { 'data-filter': name, 'aria-label': label, onchange: onChange },
      option('', 'all'),
      ...texts.map((value) => option(value, value === '' ? '(none)' : String(value))),
    );
  const low = number('Lowest reward');
  const high = number('Highest reward');
  const step = select(
    'step',
    distinct('step').sort((a, b) => a - b),
    'Step',
  );
  const sources = distinct('source').sort();
  const source = select('source', sources.filter(Boolean), 'Source');
  const state = select('state', distinct('state').sort(), 'State');
  const text = el('input', {
    type: 'search',
    placeholder: 'Search in prompts and answers',
    'aria-label': 'Search in texts',
    oninput: onChange,
  });
  const reset = el(
    'button',
    {
      type: 'button',
      class: 'button',
      onclick: () => {
        for (const control of [low, high, step, source, state, text]) control.value = '';
        onChange();
      },
    },
    'Reset',
  );
  const accepts = (sample) =>
    (low.value === '' || (sample.reward !== null && sample.reward >= Number(low.value))) &&
    (high.value === '' || (sample.reward !== null && sample.reward <= Number(high.value))) &&
    (step.value === '' || String(sample.step) === step.value) &&
    (source.value === '' || sample.source === source.value) &&
    (state.value === '' || sample.state === state.value) &&
    sample.words.includes(text.value.trim().toLowerCase());
  const element = el(
    'div',
    { class: 'controls', role: 'search', 'aria-label': 'Filter samples' },
    field('Reward', low),
    field('to', high),
    field('Step', step),
    field('Source', source),
    field('State', state),
    text,
    reset,
  );
  return { element, accepts };
}

// --- the list ---

function sampledText(sample) {
  return sample.segments
    .map((segment) => {
      const sampled = unroll(segment.sampled);
      return segment.text.filter((_, at) => sampled[at]).join('');
    })
    .join('');
}

function listItem(sample, onClick) {
  const answer = sampledText(sample).trim();
  const reward = sample.reward === null ? '\u2013' : formatNumber(sample.reward);
  return el(
    'li',
    {
      id: `sample-${sample.index}`,
      role: 'option',
      'aria-selected': 'false',
      class: `state-${sample.state}`,
      onclick: onClick,
    },
    el(
      'span',
      { class: 'item-top' },
      el('b', {}, reward),
      el('span', { class: 'badge' }, sample.state),
      el('span', { class: 'item-step' }, `step ${sample.step}`),
    ),
    el('span', { class: 'item-text' }, (answer || sample.prompt_text || sample.reason || ' ').slice(0, 160)),
  );
}

// --- one sample ---

function sampleDetail(sample) {
  const tokens = tokensOf(sample);
  const detail = el('div', {}, sampleHead(sample));
  if (sample.film) {
    detail.append(el('img', { class: 'film', src: sample.film, alt: 'what the policy saw, a frame per decision' }));
  }
  if (!tokens.length) {
    const nothing = absent('Nothing was recorded of its tokens.');
    detail.append(...[imagesOf(sample), promptOf(sample), nothing].filter(Boolean));
    return detail;
  }
  if (!isConversation(sample)) {
    detail.append(...[imagesOf(sample), promptOf(sample), ...tokenView(tokens)].filter(Boolean));
    return detail;
  }
  const body = el('div', {});
  const show = (view) => {
    browser.view = view;
    body.replaceChildren(...(view === 'conversation' ? conversationView(sample, tokens) : tokenView(tokens)));
  };
  const views = [
    ['conversation', 'Conversation'],
    ['tokens', 'Token by token'],
  ];
  if (sample.images?.length) detail.append(...[imagesOf(sample), promptOf(sample)].filter(Boolean));
  detail.append(el('div', { class: 'view-bar' }, choice('Show the episode as', views, browser.view, show)), body);
  show(browser.view);
  return detail;
}

/** Tokens, coloured by one of their facts, which are shown for the token that is pointed at. */
function tokenView(tokens) {
  const facts = el('div', { class: 'token-facts' });
  const scale = el('div', { class: 'scale' });
  const text = el('div', { class: 'tokens', role: 'group', 'aria-label': 'Tokens' });
  const paint = () => paintTokens(text, tokens, scale);
  const modes = choice(
    'Colour tokens by',
    Object.entries(MODES).map(([key, mode]) => [key, mode.name]),
    browser.mode,
    (mode) => {
      browser.mode = mode;
      paint();
    },
  );
  text.append(...tokens.flatMap((token, index) => tokenParts(token, index, tokens)));
  listenToTokens(text, tokens, facts);
  showTokenFacts(facts, null);
  paint();
  return [el('div', { class: 'token-bar' }, el('span', { class: 'bar-label' }, 'Colour by'), modes, scale), facts, text];
}

function sampleHead(sample) {
  const pairs = [
    ['Reward', sample.reward === null ? '\u2013' : formatNumber(sample.reward)],
    ['State', sample.state],
    ['Step', sample.step],
    ['Source', sample.source || '\u2013'],
    ['Label', sample.label ?? '\u2013'],
    ['Tokens', `${sample.num_tokens}${sample.is_truncated ? ', truncated' : ''}`],
    ['Pass / prompt / sample', sample.key.map((part) => part ?? '\u2013').join(' / ')],
    ...(sample.score !== null && sample.score !== sample.reward ? [['Score', formatNumber(sample.score)]] : []),
    ...(sample.reason ? [['Reason', sample.reason]] : []),
    ...Object.entries(sample.extra).map(([name, value]) => [
      name,
      typeof value === 'number' ? formatNumber(value) : JSON.stringify(value),
    ]),
  ];
  return el(
    'dl',
    { class: 'pairs' },
    ...pairs.map(([name, value]) => el('div', {}, el('dt', {}, name), el('dd', {}, String(value)))),
  );
}

/** Images of the prompt, in its order. They stay in view where a long prompt is folded. */
function imagesOf(sample) {
  if (!sample.images?.length) return null;
  const shown = sample.images.map((source) => el('img', { src: source, alt: 'image of the prompt' }));
  return el('div', { class: 'images' }, ...shown);
}

function promptOf(sample) {
  if (!sample.prompt_text) return null;
  return el(
    'details',
    { class: 'prompt', open: sample.prompt_text.length < 600 },
    el('summary', {}, 'Prompt'),
    el('pre', {}, sample.prompt_text),
  );
}

/** `[value, count]` pairs as one value per token. */
function unroll(pairs) {
  return pairs.flatMap(([value, count]) => Array.from({ length: count }, () => value));
}

function tokensOf(sample) {
  return sample.segments.flatMap((segment) => {
    const names = ['sampled', 'advantage', 'fate', 'version', 'turn'];
    const [sampled, advantage, fate, version, turn] = names.map((name) => unroll(segment[name]));
    return segment.text.map((text, at) => {
      const engine = segment.engine[at] === null ? null : segment.engine[at] * LOG_PROB_UNIT;
      const gap = segment.gap[at] === null ? null : segment.gap[at] * GAP_UNIT;
      return {
        text,
        segment: segment.segment,
        sharedWith: at < segment.shared[0] ? segment.shared[1] : null,
        turn: turn[at],
        position: segment.first + at,
        isSampled: sampled[at],
        engine,
        gap,
        trainer: engine === null || gap === null ? null : engine + gap,
        advantage: advantage[at],
        fate: fate[at],
        version: version[at],
      };
    });
  });
}

/** The token's element, and before it a word on tokens that were left out. */
function tokenParts(token, index, tokens) {
  const missing = index ? token.position - tokens[index - 1].position - 1 : 0;
  const made = el(
    'span',
    { class: token.isSampled ? 'token' : 'token context', tabindex: index ? -1 : 0, 'data-index': index },
    token.text,
  );
  if (token.text.includes('\n')) made.classList.add('breaks');
  return missing > 0 ? [el('span', { class: 'missing' }, `${plural(missing, 'token')} left out`), made] : [made];
}

function listenToTokens(text, tokens, facts) {
  const show = (target) => {
    if (target.dataset?.index !== undefined) showTokenFacts(facts, tokens[Number(target.dataset.index)]);
  };
  text.addEventListener('mouseover', (event) => show(event.target));
  text.addEventListener('focusin', (event) => show(event.target));
  text.addEventListener('click', (event) => event.target.dataset.index !== undefined && event.target.focus());
  text.addEventListener('keydown', (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const index = Number(event.target.dataset.index) + by;
    const next = by && text.querySelector(`[data-index="${index}"]`);
    if (!next) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
}

function showTokenFacts(facts, token) {
  const known = (value, format) => (value === null || value === undefined ? '\u2013' : format(value));
  const pairs = [
    ['Token', token ? JSON.stringify(token.text) : 'point at one'],
    ['Position', token ? String(token.position) : '\u2013'],
    ['Engine log-prob', known(token?.engine, (value) => `${formatNumber(value)}  (${formatShare(Math.exp(value))})`)],
    ['Trainer log-prob', known(token?.trainer, formatNumber)],
    ['Gap', known(token?.gap, formatSigned)],
    ['Advantage', known(token?.advantage, formatSigned)],
    ['Version', known(token?.version, String)],
    ['Fate', token && !token.isSampled ? 'context, not sampled' : known(token?.fate, String)],
  ];
  facts.replaceChildren(...pairs.map(([name, value]) => el('div', {}, el('span', {}, name), el('b', {}, value))));
}

// --- colours ---

function paintTokens(text, tokens, scale) {
  const mode = MODES[browser.mode];
  const values = tokens.map(mode.of);
  const known = values.filter((value) => value !== null && value !== undefined);
  const painter = painterOf(mode, known);
  for (const made of text.querySelectorAll('.token')) {
    const value = values[Number(made.dataset.index)];
    made.style.background = value === null || value === undefined ? '' : painter.colour(value);
  }
  scale.replaceChildren(
    ...(known.length ? painter.legend() : [el('span', { class: 'hint' }, 'not recorded for this sample')]),
  );
}

function painterOf(mode, known) {
  if (mode.kind === 'diverging') return divergingPainter(mode, known);
  if (mode.kind === 'sequential') return sequentialPainter(mode, known);
  if (mode.kind === 'steps') return stepsPainter([...new Set(known)].sort((a, b) => a - b));
  return fatePainter([...new Set(known)]);
}

function mixed(name, share) {
  return `color-mix(in srgb, var(--${name}) ${Math.round(100 * share)}%, transparent)`;
}

/** The largest value would leave all others pale if it were alone at the end of the scale. */
function scaleEnd(sizes) {
  const sorted = [...sizes].sort((a, b) => a - b);
  return sorted[Math.floor(0.98 * (sorted.length - 1))] || sorted[sorted.length - 1] || 1;
}

function divergingPainter(mode, known) {
  const end = scaleEnd(known.map(Math.abs));
  const paint = (value) =>
    value
      ? mixed(value < 0 ? 'negative' : 'positive', 0.08 + 0.62 * Math.min(1, Math.abs(value) / end))
      : 'transparent';
  return {
    colour: paint,
    legend: () => gradientLegend(paint, [-end, end], (value) => formatSigned(Number(value.toPrecision(2))), mode),
  };
}

function sequentialPainter(mode, known) {
  const end = scaleEnd(known);
  const paint = (value) => mixed('surprise', 0.7 * Math.min(1, value / end));
  return { colour: paint, legend: () => gradientLegend(paint, [0, end], (value) => formatShort(-value), mode) };
}

function gradientLegend(paint, [low, high], format, mode) {
  const bar = el('span', { class: 'gradient', 'aria-hidden': 'true' });
  const stops = Array.from({ length: 9 }, (_, at) => paint(low + ((high - low) * at) / 8));
  bar.style.background = `linear-gradient(to right, ${stops.join(', ')})`;
  return [el('span', {}, `${format(low)} ${mode.low}`), bar, el('span', {}, `${format(high)} ${mode.high}`)];
}

function stepsPainter(versions) {
  const share = (version) =>
    versions.length > 1 ? 0.12 + (0.55 * versions.indexOf(version)) / (versions.length - 1) : 0.3;
  const paint = (version) => mixed('version', share(version));
  const shown = versions.length > 6 ? [versions[0], versions[versions.length - 1]] : versions;
  return { colour: paint, legend: () => shown.map((version) => key(paint(version), `version ${version}`)) };
}

function fatePainter(found) {
  const paint = (fate) => mixed(`fate-${Math.max(0, FATES.indexOf(fate))}`, 0.42);
  return { colour: paint, legend: () => found.map((fate) => key(paint(fate), fate)) };
}

function key(keyColour, text) {
  return el('span', { class: 'run-name' }, swatch(keyColour), text);
}
