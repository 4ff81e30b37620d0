"""docs/scoreboard.md and its curves, from the raw logs of runs: `python bench/scoreboard.py`.

A comparison is a folder of bench/results/scoreboard: the JSON lines of bench/real_tasks.py, one file a run, and
`about.json` with what they do not say: title, task, model, hardware, date, commands, and what is missing and slower.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real_tasks import Run, read_run

ROOT = Path(__file__).parents[1]
LOGS, PAGE, IMAGES = ROOT / "bench/results/scoreboard", ROOT / "docs/scoreboard.md", ROOT / "docs/images"
HEAD = """\
# Scoreboard

Runs on real weights, beside TRL's where there is a row of it: the same weights, prompts in the same order, rewards and
hyperparameters on the same machine. Seconds are counted from the command, with imports, loading and evaluations; a run
without them was not alone on its device. This page is written by `python bench/scoreboard.py` from the logs in
[bench/results/scoreboard](../bench/results/scoreboard), and has nothing that was not run.
"""
COLUMNS = ("run", "test set before", "after", "s to step 1", "s in all", "s a step, median", "tokens/s")
PEER_COLUMNS = ("times TRL's step", "of TRL's time to TRL's last accuracy")
WIDTH, HEIGHT, MARGIN = 720, 300, 48
COLORS = {"hotseat": "#2563eb", "trl": "#d97706"}
OTHER_COLORS = ("#059669", "#7c3aed", "#db2777", "#475569")  # of other labels


@dataclass(frozen=True)
class Comparison:
    """Runs of one task. about: what `about.json` says."""

    name: str  # of its folder
    about: dict[str, Any]
    runs: list[Run]

    @property
    def columns(self) -> tuple[str, ...]:
        return COLUMNS + (PEER_COLUMNS if any(map(is_peer, self.runs)) else ())

    def peer_of(self, run: Run) -> Run | None:
        """Return the peer's run with the same seed; None if there is none, or if the run has settings of its own."""
        if run.facts["label"] != run.facts["side"]:
            return None
        return next((peer for peer in self.runs if is_peer(peer) and peer.facts["seed"] == run.facts["seed"]), None)


def is_peer(run: Run) -> bool:
    return bool(run.facts["side"] == "trl")


def read_comparisons(logs: Path = LOGS) -> list[Comparison]:
    """Return the comparisons of which something was run."""
    comparisons = [
        Comparison(
            about.parent.name,
            json.loads(about.read_text()),
            [run for run in map(read_run, sorted(about.parent.glob("*.jsonl"))) if run.evaluations and run.steps],
        )
        for about in sorted(logs.glob("*/about.json"))
    ]
    return [each for each in comparisons if each.runs]


def page(comparisons: list[Comparison]) -> str:
    return "\n".join([HEAD, *map(section, comparisons)])


def section(comparison: Comparison) -> str:
    about, columns = comparison.about, comparison.columns
    axis = "seconds" if timed_of(comparison.runs) else "steps"
    return f"""## {about["title"]}

![Accuracy on the test set over {axis}](images/scoreboard-{comparison.name}.svg)

| {" | ".join(columns)} |
|{" --- |" * len(columns)}
{chr(10).join(row(comparison, run) for run in comparison.runs)}

- **Task**: {about["task"]}.
- **Model**: {about["model"]}. Numbers of published tables are of other weights.
- **Hardware**: {about["hardware"]}; {about["date"]}. [The log](../bench/results/h200_{comparison.name}.txt).
{bullet("Missing", about["missing"])}{bullet("Slower than wanted", about["slower"])}
```bash h200=bench/results/h200_{comparison.name}.txt
{chr(10).join(about["commands"])}
```
"""


def bullet(title: str, texts: list[str]) -> str:
    return f"- **{title}**: {'; '.join(texts)}.\n" if texts else ""


def row(comparison: Comparison, run: Run) -> str:
    seconds, rate = run.medians()
    peer = comparison.peer_of(run)
    times, share = "", ""
    if peer is not None and peer is not run and run.facts["is_timed"] and peer.facts["is_timed"]:
        times = f"{peer.medians()[0] / seconds:.1f}"
        ours, theirs = run.seconds_to(peer.last), peer.seconds_to(peer.last)
        share = "not reached" if ours is None or theirs is None else f"{ours / theirs:.2f}"
    timed = [f"{run.steps[0]['at_s']:.0f}", f"{run.evaluations[-1]['at_s']:.0f}", f"{seconds:.2f}", f"{rate:,.0f}"]
    cells = [
        run.name if run.is_complete else f"{run.name}, to step {run.evaluations[-1]['step']}",
        f"{run.evaluations[0]['accuracy']:.1%}",
        f"{run.last:.1%}",
        *(timed if run.facts["is_timed"] else [""] * len(timed)),
        *((times, share) if len(comparison.columns) > len(COLUMNS) else ()),
    ]
    return f"| {' | '.join(cells)} |"


def timed_of(runs: list[Run]) -> list[Run]:
    return [run for run in runs if run.facts["is_timed"]]


def colors_of(runs: list[Run]) -> dict[str, str]:
    """Return a colour for each label."""
    others = sorted({run.facts["label"] for run in runs} - COLORS.keys())
    return COLORS | dict(zip(others, itertools.cycle(OTHER_COLORS)))


def curves(runs: list[Run]) -> str:
    """Draw accuracy over seconds of the runs that were alone on the device; over steps if there is none. As SVG."""
    timed, colors = timed_of(runs), colors_of(runs)
    key, unit, tick_x = ("at_s", "s", 60) if timed else ("step", "steps", 5)
    drawn = timed or runs
    points = {run.name: [(each[key], each["accuracy"]) for each in run.evaluations] for run in drawn}
    every = [point for each in points.values() for point in each]
    last_x = tick_x * max(1, math.ceil(max(at for at, _ in every) / tick_x))
    low = math.floor(20 * min(accuracy for _, accuracy in every)) / 20
    high = math.ceil(20 * max(accuracy for _, accuracy in every)) / 20

    def place(at: float, accuracy: float) -> tuple[float, float]:
        x = MARGIN + at / last_x * (WIDTH - 2 * MARGIN)
        y = HEIGHT - MARGIN - (accuracy - low) / (high - low) * (HEIGHT - 2 * MARGIN)
        return round(x, 1), round(y, 1)

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for tick in range(round(20 * low), round(20 * high) + 1):
        x, y = place(0, tick / 20)
        parts += [
            f'<line x1="{x}" y1="{y}" x2="{WIDTH - MARGIN}" y2="{y}" stroke="#e5e7eb"/>',
            f'<text x="{x - 6}" y="{y + 4}" text-anchor="end">{tick * 5}%</text>',
        ]
    for at in range(0, last_x + 1, tick_x):
        x, y = place(at, low)
        parts.append(f'<text x="{x}" y="{y + 18}" text-anchor="middle">{at} {unit}</text>')
    for run in drawn:
        color = colors[run.facts["label"]]
        line = [place(*point) for point in points[run.name]]
        path = " ".join(f"{x},{y}" for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>' for x, y in line]
        x, y = line[-1]
        parts.append(f'<text x="{x}" y="{y - 10}" text-anchor="end" fill="{color}">{run.name}</text>')
    style = 'font-family="sans-serif" font-size="12" fill="#374151"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {style}>\n{body}\n</svg>\n'


def files() -> dict[Path, str]:
    """Return every file that is written, with its text."""
    comparisons = read_comparisons()
    pictures = {IMAGES / f"scoreboard-{each.name}.svg": curves(each.runs) for each in comparisons}
    return {PAGE: page(comparisons), **pictures}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
        print(path.relative_to(ROOT))
