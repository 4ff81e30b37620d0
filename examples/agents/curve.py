"""Draw the success of runs over their steps as an SVG file.

    python examples/agents/curve.py OUT.svg RUN_DIRECTORY [RUN_DIRECTORY ...] [--title TEXT]

A thin line for each run is the mean reward of the episodes it learned from, points are its evaluations on held-out
prompts. All numbers are those of `metrics.jsonl`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 48, 16, 32, 40
COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a")


def read(run: Path) -> list[dict[str, float]]:
    """Return the records of a run, one for each step."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def draw(runs: list[list[dict[str, float]]], title: str) -> str:
    """Return the curves of runs as SVG."""
    last = max(record["step"] for records in runs for record in records)

    def x(step: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * step / last, 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        '  font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14">{title}</text>',
    ]
    for value in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        parts.append(f'<path d="M{LEFT} {y(value)}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(value) + 4}" text-anchor="end">{value:.1f}</text>')
    for step in range(0, int(last) + 1, max(1, int(last) // 5)):
        parts.append(f'<text x="{x(step)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{WIDTH // 2}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
    for colour, records in zip(COLOURS, runs, strict=False):
        learned = [(record["step"], record["reward"]) for record in records if "reward" in record]
        held_out = [(record["step"], record["eval/accuracy"]) for record in records if "eval/accuracy" in record]
        line = " ".join(f"{x(step)},{y(value)}" for step, value in learned)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-opacity="0.5"/>')
        parts += [f'<circle cx="{x(step)}" cy="{y(value)}" r="4" fill="{colour}"/>' for step, value in held_out]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--title", default="Success: held-out (points), while learning (lines)")
    options = parser.parse_args()
    if len(options.runs) > len(COLOURS):
        parser.error(f"{len(options.runs)} runs: there are colours for {len(COLOURS)}")
    runs = [read(run) for run in options.runs]
    options.out.write_text(draw(runs, options.title))
    for path, records in zip(options.runs, runs, strict=True):
        held_out = [record["eval/accuracy"] for record in records if "eval/accuracy" in record]
        print(f"{path}: held-out {held_out[0]:.3f} -> {held_out[-1]:.3f} in {int(records[-1]['step'])} steps")


if __name__ == "__main__":
    main()
