// Builds the page, and keeps navigation and theme.

const ALL_SECTIONS = [
  ['overview', 'Overview', showOverview],
  ['curves', 'Curves', showCurves],
  ['timeline', 'Timeline', showTimeline],
  ['phases', 'Phases', showPhases],
  ['memory', 'Memory', showMemory],
  ['machine', 'Machine', showMachine],
  ['distributions', 'Distributions', showDistributions],
  ['gap', 'Log-prob gap', showGap],
  ['samples', 'Samples', showSamples],
  ['setup', 'Setup', showSetup],
];
// An evaluation takes no steps: it has answers, and nothing that happens over time.
const OF_TRAINING = ['timeline', 'phases', 'memory', 'machine', 'gap'];
const SECTIONS = ALL_SECTIONS.filter(([id]) => !OF_TRAINING.includes(id) || runs.some((run) => !run.is_evaluation));

const systemTheme = matchMedia('(prefers-color-scheme: dark)');
let chosenTheme = null;

function applyTheme() {
  const theme = chosenTheme ?? (systemTheme.matches ? 'dark' : 'light');
  document.documentElement.dataset.theme = theme;
  const other = theme === 'dark' ? 'light' : 'dark';
  const button = document.getElementById('theme');
  button.textContent = other === 'dark' ? 'Dark' : 'Light';
  button.setAttribute('aria-label', `Switch to ${other} colours`);
  button.onclick = () => {
    chosenTheme = other;
    applyTheme();
  };
  redrawAll();
}

/** The link of the section that is on screen is marked. */
function followScrolling(links) {
  const observer = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        for (const [id, link] of links) link.setAttribute('aria-current', String(id === entry.target.id));
      }
    },
    { rootMargin: '-20% 0px -70% 0px' },
  );
  for (const id of links.keys()) observer.observe(document.getElementById(id));
}

function showNavigation() {
  const links = new Map(SECTIONS.map(([id, text]) => [id, el('a', { href: `#${id}` }, text)]));
  document.getElementById('nav').append(...links.values());
  followScrolling(links);
}

applyTheme();
systemTheme.addEventListener('change', applyTheme);
addEventListener('beforeprint', startAll);
for (const [id] of ALL_SECTIONS) if (!SECTIONS.some(([shown]) => shown === id)) document.getElementById(id).remove();
showNavigation();
for (const [, , show] of SECTIONS) show();
selectRun(0);
document
  .getElementById('footer')
  .append(
    `Hotseat ${data.version}. Charts by Apache ECharts, Apache License 2.0. This file is complete: it fetches nothing.`,
  );
