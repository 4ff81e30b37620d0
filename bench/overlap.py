"""What rollout beside training gains where episodes take very different times, beside the prediction of the gain.

    python bench/overlap.py [--steps 24] [--mean 0.4] [--staleness 1 2] [--checkpoints]

An agent whose tool waits: log-normal, sigma 1. One sample per prompt, 16 prompts a step, 16 episodes at once. Training
takes as long as an episode on average (it sleeps so long, besides its own work on a tiny model). Order of arrival, open
requests keep their cache, the queue is as long as the staleness. Everything in one process. The prediction is that of
`hotseat plan --from` the run without staleness.

With --checkpoints: what a checkpoint after every step costs while episodes are open, instead.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hotseat.config import loads, loads_saved
from hotseat.demo import make_model
from hotseat.loop.rl import phases
from hotseat.loop.rl.forecast import forecasts, recorded_costs, resources_of
from hotseat.loop.run import start
from hotseat.observe import read_lines

GROUPS = 16
WARM_UP = 4  # steps that are not counted
AGENT = """
import asyncio
import math
import random

from hotseat.agents import Environment, Step

MEAN_S = {mean}


class Tool(Environment):
    def reset(self, prompt, label):
        self.wait_s = random.Random(int(label)).lognormvariate(math.log(MEAN_S) - 0.5, 1.0)

    async def step(self, action):
        await asyncio.sleep(self.wait_s)
        return Step(feedback="", reward=float(len(action) % 2), done=True)
"""


def main() -> None:
    """Measure, predict and print."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=24)
    arguments.add_argument("--mean", type=float, default=0.4, help="seconds that the tool waits on average")
    arguments.add_argument("--staleness", type=int, nargs="+", default=[1, 2])
    arguments.add_argument("--checkpoints", action="store_true")
    options = arguments.parse_args()
    slow_down_updates(options.mean)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), options.steps, options.mean)
        if options.checkpoints:
            measure_checkpoints(Path(folder), options.steps, options.staleness)
            return
        for staleness in (0, *options.staleness):
            rows.append((staleness, *measure(Path(folder), options.steps, staleness)))
        predicted = predict(Path(folder), [staleness for staleness, *_ in rows])
    table = Table(title=f"{options.steps} steps of {GROUPS} episodes, tool and training {options.mean} s on average")
    names = (
        "staleness",
        "seconds a step",
        "predicted",
        "times synchronous",
        "predicted",
        "measured / predicted",
        "oldest",
    )
    for name in names:
        table.add_column(name, justify="right")
    for (staleness, step_s, oldest), expected in zip(rows, predicted, strict=True):
        gain, forecast = rows[0][1] / step_s, predicted[0] / expected
        cells = [f"{step_s:.2f}", f"{expected:.2f}", f"{gain:.2f}", f"{forecast:.2f}", f"{gain / forecast:.0%}"]
        table.add_row(str(staleness), *cells, f"{oldest:.0f}")
    Console(width=120).print(table)


def slow_down_updates(seconds: float) -> None:
    """Let every update sleep, as if the model were large."""
    run = phases.UpdatePhase.run

    def slow_run(self: phases.UpdatePhase, *args: object) -> object:
        time.sleep(seconds)
        return run(self, *args)  # type: ignore[arg-type]

    phases.UpdatePhase.run = slow_run  # type: ignore[method-assign, assignment]


def prepare(folder: Path, num_steps: int, mean: float) -> None:
    """Write a tiny model, prompts whose label is the seed of the tool's wait, and the agent."""
    make_model(folder / "model", 0)
    rows = [f'{{"input": "{number % 10}+1=", "label": "{number}"}}' for number in range(num_steps * GROUPS)]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    (folder / "agent.py").write_text(AGENT.format(mean=mean))


def measure(folder: Path, num_steps: int, staleness: int) -> tuple[float, float]:
    """Return seconds of a step, and the largest age of a sample."""
    rows = run(folder, num_steps, staleness, f"staleness-{staleness}")
    oldest = max(row.get("staleness_max", 0.0) for row in rows)
    return statistics.fmean(row["step_s"] for row in rows), oldest


def measure_checkpoints(folder: Path, num_steps: int, values: Sequence[int]) -> None:
    """Print how long a checkpoint after each step holds up the run, and how many groups are in flight then."""
    for staleness in values:
        rows = run(folder, num_steps, staleness, f"saved-{staleness}", "checkpoint.every=1")
        saved_s = statistics.fmean(row["time/save"] for row in rows)
        step_s = statistics.fmean(row["step_s"] for row in rows)
        open_groups = statistics.fmean(row["groups_in_flight"] for row in rows)
        print(
            f"staleness {staleness}: a checkpoint holds up the run for {saved_s * 1e3:.1f} ms, {saved_s / step_s:.1%}"
            f" of a step of {step_s:.2f} s, with {open_groups:.1f} groups in flight"
        )


def run(folder: Path, num_steps: int, staleness: int, name: str, *overrides: str) -> list[dict[str, float]]:
    """Make a run; return the metrics of its steps after the first few."""
    ahead = f"overlap: {{staleness: {staleness}, order: arrival, in_flight: keep}}" if staleness else ""
    start(
        loads(
            f"""
name: {name}
run_dir: {folder}/runs
cluster: {{runtime: local, inventory: 1x2, component_placement: {{actor: 0, rollout: 1}}}}
actor: {{model: {folder}/model}}
data: {{path: {folder}/prompts.jsonl, label_key: label, max_length: 16}}
agent: {{path: {folder}/agent.py, max_concurrent: {GROUPS}}}
rollout: {{batch_size: {GROUPS}, samples_per_prompt: 1, max_new_tokens: 4, num_slots: {GROUPS}}}
algorithm: {{estimator: reinforce}}
train: {{dtype: fp32, batch_size: {GROUPS}, micro_batch_size: {GROUPS}}}
log: {{samples_per_step: 0}}
{ahead}
""",
            overrides,
        )
    )
    rows = [row for row in read_lines(folder / "runs" / name / "metrics.jsonl") if row["step"] > WARM_UP]
    assert len(rows) == num_steps - WARM_UP
    return rows


def predict(folder: Path, values: Sequence[int]) -> list[float]:
    """Return the seconds of a step for each staleness, as `hotseat plan --from` predicts them from the first run."""
    run_dir = folder / "runs" / "staleness-0"
    config, costs = loads_saved((run_dir / "config.yaml").read_text()), recorded_costs(run_dir)
    return [row.step_s for row in forecasts(config, costs, resources_of(config, 1, is_shared=False), values)]


if __name__ == "__main__":
    main()
