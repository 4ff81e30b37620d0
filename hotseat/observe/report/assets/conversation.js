// An episode as a conversation: what the policy said in each turn, what it read in between, and where the time went.

/** Whether there is more to an episode than one answer to its prompt. */
function isConversation(sample) {
  return (
    sample.turns.length > 1 ||
    sample.turns.some((turn) => turn.tool_calls.length) ||
    sample.segments.some((segment) => segment.segment > 0)
  );
}

function conversationView(sample, tokens) {
  const blocks = blocksOf(tokens);
  const segments = [...new Set(blocks.map((block) => block.segment))];
  const list = el('ol', { class: 'talk' });
  let before = null;
  for (const block of blocks) {
    if (block.segment !== before && segments.length > 1) list.append(segmentHead(block));
    before = block.segment;
    list.append(block.turn === null ? readBlock(block, sample) : saidBlock(block, sample));
  }
  return [timeStrip(sample, list), list].filter(Boolean);
}

/** Stretches of tokens: of one turn, or read by the policy, or shared with an earlier segment. */
function blocksOf(tokens) {
  const blocks = [];
  for (const token of tokens) {
    const last = blocks[blocks.length - 1];
    const isShared = token.sharedWith !== null;
    const turn = token.isSampled ? (token.turn ?? -1) : null;
    if (last && last.segment === token.segment && last.isShared === isShared && (isShared || last.turn === turn)) {
      last.tokens.push(token);
    } else {
      const { segment, sharedWith } = token;
      blocks.push({ segment, sharedWith, isShared, turn: isShared ? null : turn, tokens: [token], isFirst: !last });
    }
  }
  for (const [at, block] of blocks.entries()) {
    const [before, after] = [blocks[at - 1], blocks[at + 1]];
    block.previousTurn = before?.segment === block.segment ? before.turn : null;
    block.nextTurn = after?.segment === block.segment ? after.turn : null;
  }
  return blocks;
}

function textOf(tokens) {
  return tokens
    .map((token, at) => {
      const missing = at ? token.position - tokens[at - 1].position - 1 : 0;
      return missing > 0 ? `\n[${plural(missing, 'token')} left out]\n${token.text}` : token.text;
    })
    .join('');
}

const MARKER = /(<\|[^|<>\n]{1,40}\|>|<\/?(?:s|eos|bos|pad)>)/;

/** The text of tokens, in which markers of the chat template stand back. */
function spoken(tokens) {
  const parts = textOf(tokens).replace(/^\n+|\n+$/g, '').split(MARKER);
  return el('pre', {}, ...parts.map((part, at) => (at % 2 ? el('span', { class: 'marker' }, part) : part)));
}

function segmentHead(block) {
  const origin = block.isShared ? `, a branch of segment ${block.sharedWith + 1}` : ', from another context';
  return el('li', { class: 'talk-segment' }, `Segment ${block.segment + 1}${block.segment ? origin : ''}`);
}

function readBlock(block, sample) {
  const isLong = textOf(block.tokens).length > 700 || block.isShared;
  const name = block.isShared
    ? `${plural(block.tokens.length, 'token')} as in segment ${block.sharedWith + 1}`
    : block.isFirst
      ? 'Prompt'
      : 'Environment';
  const facts = [block.isShared ? null : plural(block.tokens.length, 'token'), block.isFirst ? null : toolTime(block, sample)];
  const head = blockHead(name, facts);
  if (!isLong) return el('li', { class: 'talk-read' }, head, spoken(block.tokens));
  return el('li', { class: 'talk-read' }, el('details', {}, el('summary', {}, head), spoken(block.tokens)));
}

/** The time from the last answer to the next request, where one turn follows another in a segment. */
function toolTime(block, sample) {
  const [previous, next] = [sample.turns[block.previousTurn], sample.turns[block.nextTurn]];
  const isKnown = next && previous && next.asked_s !== null && previous.answered_s !== null;
  const between = isKnown ? next.asked_s - previous.answered_s : -1;
  return between >= 0 ? formatSeconds(between) : null;
}

function saidBlock(block, sample) {
  const turn = sample.turns[block.turn] ?? {};
  const took = turn.answered_s === null || turn.asked_s === null ? null : turn.answered_s - turn.asked_s;
  const advantages = block.tokens.map((token) => token.advantage).filter((value) => value !== null && value !== undefined);
  const mean = advantages.length ? advantages.reduce((sum, value) => sum + value, 0) / advantages.length : null;
  const name = block.turn < 0 ? 'Policy' : `Turn ${block.turn + 1}`;
  const head = blockHead(name, [
    plural(turn.length ?? block.tokens.length, 'token'),
    took === null || Number.isNaN(took) ? null : formatSeconds(took),
    mean === null ? null : `advantage ${formatSigned(mean)}`,
  ]);
  if (turn.reward !== null && turn.reward !== undefined) {
    const kind = turn.reward > 0 ? 'good' : turn.reward < 0 ? 'bad' : 'none';
    head.append(el('span', { class: `turn-reward ${kind}` }, `reward ${formatSigned(turn.reward)}`));
  }
  const calls = (turn.tool_calls ?? []).map((call) => el('code', { class: 'tool-call' }, call));
  const tokens = el('details', { class: 'turn-tokens' }, el('summary', {}, 'Token by token'));
  tokens.addEventListener(
    'toggle',
    () => tokens.append(...tokenView(block.tokens.map((token) => ({ ...token, sharedWith: null })))),
    { once: true },
  );
  return el(
    'li',
    { class: 'talk-said', id: `turn-${block.turn}`, tabindex: -1 },
    head,
    spoken(block.tokens),
    ...(calls.length ? [el('div', { class: 'tool-calls', 'aria-label': 'Tool calls' }, ...calls)] : []),
    tokens,
  );
}

function blockHead(name, facts) {
  return el('div', { class: 'talk-head' }, el('b', {}, name), ...facts.filter(Boolean).map((fact) => el('span', {}, fact)));
}

// --- time ---

/** Seconds in which at least one answer was being sampled. */
function samplingSeconds(turns) {
  let [end, total] = [0, 0];
  for (const { asked_s: from, answered_s: to } of [...turns].sort((a, b) => a.asked_s - b.asked_s)) {
    total += Math.max(0, to - Math.max(from, end));
    end = Math.max(end, to);
  }
  return total;
}

function timeStrip(sample, list) {
  const timed = sample.turns.filter((turn) => turn.asked_s !== null && turn.answered_s !== null);
  if (sample.took_s === null || !timed.length) return null;
  const waited = sample.waited_s ?? 0;
  const sampling = samplingSeconds(timed);
  const parts = [
    ['waited', 'waiting for a place', waited],
    ['sampling', 'sampling', sampling],
    ['tool', 'environment and tools', Math.max(0, sample.took_s - sampling)],
  ];
  const whole = waited + sample.took_s || 1;
  const place = (from, to) => `left:${(100 * from) / whole}%;width:${Math.max(0.3, (100 * (to - from)) / whole)}%`;
  const bar = el('div', { class: 'time-bar' }, el('span', { class: 'time-waited', style: place(0, waited) }));
  for (const [at, turn] of sample.turns.entries()) {
    if (turn.asked_s === null || turn.answered_s === null) continue;
    const span = formatSeconds(turn.answered_s - turn.asked_s);
    const button = el('button', {
      class: 'time-turn',
      style: place(waited + turn.asked_s, waited + turn.answered_s),
      title: `Turn ${at + 1}: ${span}`,
      'aria-label': `Turn ${at + 1}, ${span}`,
    });
    button.addEventListener('click', () => {
      const target = list.querySelector(`#turn-${at}`);
      target?.scrollIntoView({ block: 'center' });
      target?.focus({ preventScroll: true });
    });
    bar.append(button);
  }
  const legend = parts.map(([kind, name, seconds]) =>
    el(
      'span',
      { class: 'time-key' },
      el('i', { class: `time-${kind}-key`, 'aria-hidden': 'true' }),
      `${name} `,
      el('b', {}, formatSeconds(seconds)),
      ` ${formatShare(seconds / whole)}`,
    ),
  );
  return el('div', { class: 'time-strip' }, el('div', { class: 'time-legend' }, ...legend), bar);
}
