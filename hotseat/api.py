"""Hotseat from Python: `hotseat.run` does what `hotseat run` does, and returns the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotseat.config import Config


@dataclass(frozen=True)
class Run:
    """A run's directory, which can be read while the run is training and afterwards.

    `Run(Path("runs/rl-1")).metrics()` reads a run of an earlier command.
    """

    path: Path

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics, a dict for each step; that of step 0 is the evaluation before training."""
        from hotseat.observe import METRICS, read_lines

        return list(read_lines(self.path / METRICS))

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

        return loads_saved((self.path / "config.yaml").read_text())

    @property
    def model(self) -> Path:
        """Folder of the exported Hugging Face model; it is there once the run has ended."""
        exported = self.config.checkpoint.export_path
        return self.path / "model" if exported is None else Path(exported)


def run(config: str | Path | Mapping[str, Any] | Config, *overrides: str) -> Run:
    """Train to the end, and return the run.

    config: a YAML file, a mapping of the same keys, or a `hotseat.config.Config`. overrides: `key=value` with dotted
    keys, as on the command line. A config that cannot work raises `hotseat.errors.UserError` before any model loads; a
    run that fails raises another `hotseat.errors.HotseatError`. Ctrl-C and SIGTERM raise KeyboardInterrupt.
    """
    from hotseat.openmp import wait_passively

    wait_passively()
    checked = _checked(config, overrides)
    from hotseat.loop.start import start
    from hotseat.loop.state.run_dir import named_run

    named = named_run(checked)
    start(named)
    assert named.name is not None
    return Run(Path(named.run_dir) / named.name)


def _checked(config: str | Path | Mapping[str, Any] | Config, overrides: tuple[str, ...]) -> Config:
    from hotseat.config import Config, load, loads, to_yaml

    if isinstance(config, str | Path):
        return load(config, overrides)
    if isinstance(config, Config):
        return loads(to_yaml(config), overrides)
    import yaml

    return loads(yaml.safe_dump(dict(config), sort_keys=False), overrides)
