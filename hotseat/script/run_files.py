"""Reader of what a run recorded in its directory."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotseat.config import Config

_NOT_FINITE = ("nan", "inf", "-inf")  # names by which a run writes such numbers, since JSON has none for them


@dataclass(frozen=True)
class Run:
    """Reader of a run directory, for use while the run is training and afterwards: `Run("runs/rl-1").metrics()`."""

    path: Path

    def __init__(self, path: str | Path):
        """Take the directory of a run. Each call of a method reads its file anew."""
        object.__setattr__(self, "path", Path(path))

    def metrics(self) -> list[dict[str, Any]]:
        """Return a dict of metrics for each step; that of step 0 is the evaluation before training."""
        from hotseat.observe import METRICS

        return [{name: _number(value) for name, value in line.items()} for line in self._lines(METRICS)]

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Return one metric as two lists: the steps at which it was measured, and its values."""
        from hotseat.errors import UserError

        records = self.metrics()
        points = [(line["step"], line[name]) for line in records if line.get(name) is not None]
        if not points:
            known = sorted({other for line in records for other in line} - {"step"})
            near = get_close_matches(name, known, n=3, cutoff=0.0)
            raise UserError(f"{self.path} has no metric {name!r}; near it are: {', '.join(near) or 'none'}")
        return [step for step, _ in points], [value for _, value in points]

    def samples(self) -> list[dict[str, Any]]:
        """Return the recorded samples, with text, log-probs and advantage of each token; none outside of RL.

        docs/run-directory.md describes their fields, and `log.samples_every` says how often samples are recorded.
        """
        from hotseat.observe import SAMPLES

        return self._lines(SAMPLES)

    def ledger(self) -> list[dict[str, Any]]:
        """Return what became of all samples: groups with their samples, state, step, version and reason. RL only."""
        from hotseat.loop.state.run_dir import LEDGER

        return self._lines(LEDGER)

    def frame(self) -> Any:
        """Return the metrics as a pandas.DataFrame, indexed by step."""
        import pandas

        return pandas.DataFrame(self.metrics()).set_index("step")

    @property
    def evaluation(self) -> dict[str, float]:
        """Metrics of the last evaluation, such as eval/accuracy; empty if nothing was evaluated."""
        measured = [
            {name: value for name, value in record.items() if name.startswith("eval/")} for record in self.metrics()
        ]
        return next((numbers for numbers in reversed(measured) if numbers), {})

    @property
    def config(self) -> Config:
        """The config as it was checked and run."""
        from hotseat.config import loads_saved

        self._check()
        return loads_saved((self.path / "config.yaml").read_text())

    @property
    def model(self) -> Path:
        """Folder of the exported Hugging Face model; it exists once the run has ended."""
        exported = self.config.checkpoint.export_path
        return self.path / "model" if exported is None else Path(exported)

    def _check(self) -> None:
        from hotseat.errors import UserError

        if not (self.path / "config.yaml").is_file():
            raise UserError(f"{self.path} holds no run: it has no config.yaml; give a directory such as runs/rl-1")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        from hotseat.observe import read_lines

        self._check()
        file = self.path / name
        return read_lines(file) if file.is_file() else []


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and value in _NOT_FINITE else value
