"""The live view of a run in a notebook: one output that is replaced, with curves, recent steps and the last lines."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Self

from hotseat.observe import LiveView

_CURVES = ("eval/accuracy", "eval/reward", "reward", "eval/loss", "loss")  # the first two that a run has are drawn
_NUM_CURVES, _NUM_STEPS, _NUM_LINES = 2, 8, 6
_WIDTH, _HEIGHT = 320, 90
_EVERY_S = 0.5  # between two replacements that show no new step


def in_notebook() -> bool:
    """Tell whether this process is the kernel of a notebook."""
    try:
        shell = get_ipython()  # type: ignore[name-defined]
    except NameError:
        return False
    return hasattr(shell, "kernel")


class NotebookView(LiveView):
    """Shows a run in the output of the cell that entered it first, whichever thread trains."""

    def __init__(self, title: str):
        super().__init__(title)
        self._lines: deque[str] = deque(maxlen=_NUM_LINES)
        self._steps: dict[int, Mapping[str, Any]] = {}
        self._output: Any = None  # None: it was not shown yet
        self._shown_s = -math.inf

    def __enter__(self) -> Self:
        from IPython.display import HTML, display

        if self._output is None:
            self._output = display(HTML(self.html()), display_id=True)
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._phase = ""
        self._show()

    def phase(self, name: str) -> None:
        super().phase(name)
        if time.monotonic() - self._shown_s >= _EVERY_S:
            self._show()

    def stage(self, text: str) -> None:
        super().phase(text)
        self._show()

    def progress(self, text: str) -> None:
        self.say(text)

    def step(self, step: int, values: Mapping[str, float | None]) -> None:
        self.pace.step = step
        self._steps[step] = values
        self._show()

    def advance(self, step: int, phase: str) -> None:
        self.pace.step = step
        self.phase(phase)

    def say(self, text: str) -> None:
        self._lines.append(text)
        self._show()

    def html(self) -> str:
        """Return the page that is shown now."""
        done = f"step {self.pace.step} of {self.pace.num_steps}" if self.pace.num_steps else "starting"
        status = f"<b>{escape(self._title)}</b> {done}" + (f": {escape(self._phase)}" if self._phase else "")
        names = [name for name in _CURVES if any(name in values for values in self._steps.values())][:_NUM_CURVES]
        curves = "".join(_curve(name, self._points(name)) for name in names)
        lines = "<br>".join(escape(line) for line in self._lines)
        return f"<div>{status}</div>{curves}{self._table()}<div style='opacity:.7'>{lines}</div>"

    def _points(self, name: str) -> list[tuple[int, float]]:
        numbers = ((step, values.get(name)) for step, values in sorted(self._steps.items()))
        return [(step, number) for step, number in numbers if number is not None and math.isfinite(number)]

    def _table(self) -> str:
        steps = sorted(self._steps)[-_NUM_STEPS:]
        names = [name for name in self._columns if any(self._steps[step].get(name) is not None for step in steps)]
        if not names:
            return ""
        head = "".join(f"<th>{escape(name)}</th>" for name in ("step", *names))
        rows = "".join(f"<tr><td>{step}</td>{''.join(map(_cell, self._values(step, names)))}</tr>" for step in steps)
        return f"<table><tr>{head}</tr>{rows}</table>"

    def _values(self, step: int, names: Sequence[str]) -> list[Any]:
        return [self._steps[step].get(name) for name in names]

    def _show(self) -> None:
        if self._output is not None:
            from IPython.display import HTML

            self._shown_s = time.monotonic()
            self._output.update(HTML(self.html()))


def _cell(value: Any) -> str:
    return "<td></td>" if value is None else f"<td>{value:.4g}</td>"


def _curve(name: str, points: Sequence[tuple[int, float]]) -> str:
    """Draw a metric over the steps, with its least and its greatest value."""
    low, high = min(value for _, value in points), max(value for _, value in points)
    first, last = points[0][0], points[-1][0]
    x = [_WIDTH * (step - first) / max(1, last - first) for step, _ in points]
    y = [_HEIGHT * (1 - (value - low) / ((high - low) or 1.0)) for _, value in points]
    line = " ".join(f"{across:.1f},{down:.1f}" for across, down in zip(x, y, strict=True))
    return (
        f"<figure style='display:inline-block;margin:4px 16px 4px 0'><figcaption>{escape(name)}: {points[-1][1]:.4g}"
        f" (from {low:.4g} to {high:.4g})</figcaption><svg width='{_WIDTH}' height='{_HEIGHT}'"
        f" viewBox='-2 -2 {_WIDTH + 4} {_HEIGHT + 4}'><polyline points='{line}' fill='none' stroke='currentColor'"
        " stroke-width='2'/></svg></figure>"
    )
