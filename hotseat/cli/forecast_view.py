"""`hotseat plan CONFIG --from RUN`: what staleness would gain, by the costs that a run measured."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from hotseat.checks.run_directory import CONFIG
from hotseat.config import Config, loads_saved
from hotseat.errors import UserError
from hotseat.loop.rl.forecast import (
    Forecast,
    Resources,
    for_samples,
    forecasts,
    own_step_s,
    recorded_costs,
    resources_of,
    without_queueing,
)
from hotseat.placement.memory_settings import EngineMemory, ForwardMemory, TrainMemory
from hotseat.placement.plan import shares_devices
from hotseat.placement.plan_types import Plan
from hotseat.placement.shapes import ModelShape
from hotseat.planning.config_plan import make_plan
from hotseat.planning.role_specs import role_specs


def check_recorded(config: Config, run_dir: Path) -> Config:
    """Return the config of a run whose costs hold for this one, too: that of an RL run with the same models."""
    if not config.has_rollouts:
        raise UserError(f"--from predicts what staleness gains in task rl; the task of this config is {config.task}")
    path = run_dir / CONFIG
    if not path.is_file():
        raise UserError(f"--from {run_dir}: there is no {path}; name the directory of a run")
    recorded = loads_saved(path.read_text())
    if not recorded.has_rollouts:
        raise UserError(f"--from {run_dir}: that run's task is {recorded.task}; name the directory of an RL run")
    here, there = _models(config), _models(recorded)
    for role in [role for role in here | there if here.get(role) != there.get(role)]:
        raise UserError(
            f"--from {run_dir}: the costs of that run do not hold for this config: there {_described(there, role)},"
            f" here {_described(here, role)}. Name the directory of a run with the same models"
        )
    return recorded


def print_forecast(config: Config, plan: Plan, recorded: Config, run_dir: Path, console: Console) -> None:
    """Print the predicted steps of a config, and beside them how well the recorded run itself is predicted.

    recorded: the config of the run, from `check_recorded`.
    """
    costs, resources = recorded_costs(run_dir), _resources(recorded, make_plan(recorded))
    costs = without_queueing(recorded, costs, resources)
    num_samples = config.rollout.samples_per_prompt
    factor = _samples_per_step(config) / _samples_per_step(recorded)
    rows = forecasts(config, for_samples(costs, num_samples, factor), _resources(config, plan))
    console.print(f"\nStaleness, as predicted from the last {costs.num_steps} steps of {run_dir}", style="bold")
    console.print(_table(rows, _samples_per_step(config)))
    own = f"that run, staleness {recorded.overlap.staleness}: {costs.step_s:.2f} s a step measured"
    own_s = own_step_s(recorded, costs, resources)
    if own_s is None:
        own += "; overlap.in_flight restart is not simulated"
    else:
        own += f", {own_s:.2f} s predicted; {costs.training_s:.2f} s of it from a batch to the end of its push"
    console.print(own, style="dim", highlight=False)


def _models(config: Config) -> dict[str, ModelShape | str]:
    """Return the model of each role: its shape, by which costs are the same, or its name where that is not known."""
    names = {"critic": config.critic.model, "reward": config.reward.model, "reference": config.reference.model}
    names["judge"] = config.reward.judge.model
    return {
        spec.name: spec.model or names.get(spec.name) or str(config.actor.model)
        for spec in role_specs(config)
        if isinstance(spec.memory, TrainMemory | ForwardMemory | EngineMemory)
    }


def _described(models: dict[str, ModelShape | str], role: str) -> str:
    model = models.get(role)
    if model is None:
        return f"is no {role}"
    if isinstance(model, str):
        return f"the {role} is {model}"
    return (
        f"the {role} has {model.num_parameters / 1e9:.2f}B parameters ({model.num_layers} layers of width"
        f" {model.hidden_size:,})"
    )


def _resources(config: Config, plan: Plan) -> Resources:
    return resources_of(config, len(plan.role("rollout").processes), is_shared=shares_devices(plan))


def _samples_per_step(config: Config) -> int:
    return config.rollout.batch_size * config.rollout.samples_per_prompt


def _table(rows: list[Forecast], num_samples: int) -> Table:
    """Make a table of the predicted speed for each staleness, in two ways unless devices are shared."""
    is_shared = rows[0].step_s_waiting is None
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("staleness", justify="right")
    names = ["arrival, recompute"] if is_shared else ["prompt, wait", "arrival, keep or recompute"]
    for name in names:
        for unit in (f"{name}: s a step", "samples/s", "gain"):
            table.add_column(unit, justify="right")
    for row in rows:
        cells = [str(row.staleness)]
        pairs = [(row.step_s, rows[0].step_s)]
        if row.step_s_waiting is not None and rows[0].step_s_waiting is not None:
            pairs.insert(0, (row.step_s_waiting, rows[0].step_s_waiting))
        for step_s, synchronous_s in pairs:
            cells += [f"{step_s:.2f}", f"{num_samples / step_s:,.1f}", f"{synchronous_s / step_s:.2f}x"]
        table.add_row(*cells)
    return table
