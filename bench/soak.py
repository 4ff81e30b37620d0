"""A soak: a run on Ray whose processes are killed at random, against the same run left alone.

Engine, rollout host, reward worker, ranks of actor and critic, driver, raylet and Ray's server get `kill -9` at random
moments. `hotseat run` has to come to its end by itself: engines, hosts and rewards are replaced, models restarted in
the living run, and the driver is started again. Then every sample is looked up in both ledgers, and weights are
compared bit by bit (samples ahead of training may be trained in another order, so at a staleness they may differ).

The next process is killed when the run is past the step in which the one before was. What a kill costs is the time from
the kill to the end of that step, less what the step had left to go by the pace of the run without kills: what stood
still, and what was done again, if the death was noticed in that step. "Training" is the time of the steps that count in
the end.

    python bench/soak.py [--steps 100] [--kills 25] [--seed 0] [--staleness 0]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

import psutil
from rich.console import Console
from safetensors.torch import load_file

from hotseat.demo import make_files
from hotseat.faults import VARIABLE
from hotseat.loop.rl.ledger import read_ledger
from hotseat.observe import read_lines

# What dies: the processes that register as one of these, or programs of Ray.
REGISTERED = {
    "engine": ("rollout:0",),
    "rollout host": ("agents:0",),
    "reward worker": ("rewards",),
    "trainer rank": ("actor:0", "actor:1"),
    "critic": ("critic:0",),
}
PROGRAMS = {"raylet": "raylet", "Ray's server": "gcs_server"}
# Half engines, hosts and rewards, a quarter models, and a quarter the rest.
KINDS = (
    *("engine", "rollout host", "reward worker", "engine", "rollout host", "reward worker"),
    *("trainer rank", "critic", "trainer rank"),
    *("driver", "raylet", "Ray's server"),
)
BATCH_SIZE, GROUP_SIZE = 16, 8
LONGEST_S = 600.0  # without a step

CONFIG = """
task: rl
name: {name}
run_dir: {directory}
cluster: {{component_placement: {{actor: 0-1, critic: 2, rollout: 3}}}}
actor: {{model: {model}, optimizer: {{learning_rate: 1e-3, schedule: constant}}}}
critic: {{optimizer: {{learning_rate: 1e-3, schedule: constant}}}}
algorithm: {{estimator: gae, gae_lambda: 0.9}}
data: {{path: {prompts}, label_key: label, max_length: 24, max_samples: {num_prompts}}}
reward: {{function: {reward}}}
rollout: {{batch_size: {batch_size}, samples_per_prompt: {group_size}, max_new_tokens: 6}}
overlap: {{staleness: {staleness}}}
train: {{dtype: fp32, batch_size: {num_samples}, micro_batch_size: 32}}
checkpoint: {{every: 10, keep_last: 2, memory_every: 1}}
run: {{max_restarts: 10, standby: true}}
log: {{every: 1000}}
"""


# Something to learn for a model that knows nothing yet, so that every step moves the weights.
REWARD = """
def reward_func(queries, prompts, labels):
    return [float(query[len(prompt):].count("7")) for query, prompt in zip(queries, prompts)]
"""


class Run:
    """A command in a process of its own, which restarts what it has to."""

    def __init__(self, directory: Path, name: str, text: str):
        self.directory = directory / name
        self.metrics = self.directory / "metrics.jsonl"
        config = directory / f"{name}.yaml"
        config.write_text(text)
        self._pids = directory / f"{name}-processes"
        self._pids.mkdir()
        self._log = (directory / f"{name}.log").open("ab")
        self._step, self._stepped_s = 0, time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hotseat", "run", str(config)],
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, VARIABLE: str(self._pids)},
        )

    def tail(self) -> str:
        return "\n".join(Path(self._log.name).read_text(errors="replace").splitlines()[-30:])

    def step(self) -> int:
        """Return the last step that was finished; those after the checkpoint do not count once the run went back."""
        lines = read_lines(self.metrics) if self.metrics.exists() else []
        step = lines[-1]["step"] if lines else 0
        if step != self._step:
            self._step, self._stepped_s = step, time.monotonic()
        return step

    @property
    def since_step_s(self) -> float:
        return time.monotonic() - self._stepped_s

    def wait_for(self, step: int) -> float:
        """Wait until the run has made a step; return the moment. Raises if it ends before, or stands still."""
        while self.step() < step:
            if self.process.poll() is not None or self.since_step_s > LONGEST_S:
                raise RuntimeError(f"{self.directory} does not come to step {step}:\n{self.tail()}")
            time.sleep(0.02)
        return self._stepped_s

    def kill(self, kind: str, chance: random.Random) -> bool:
        """Kill a process of that kind; return whether there is one at this moment."""
        ours = psutil.Process(self.process.pid).children(recursive=True)
        if kind == "driver":
            found = psutil.Process(self.process.pid).children()[:1]
        elif kind in PROGRAMS:
            found = [each for each in ours if _name(each) == PROGRAMS[kind]]
        else:
            path = self._pids / f"{chance.choice(REGISTERED[kind])}.pid"
            pid = int(path.read_text()) if path.exists() else 0
            found = [each for each in ours if each.pid == pid]
        for each in found[:1]:
            try:
                os.kill(each.pid, signal.SIGKILL)
            except ProcessLookupError:
                return False
        return bool(found)

    def finish(self) -> None:
        if self.process.wait(LONGEST_S) != 0:
            raise RuntimeError(f"{self.directory} failed:\n{self.tail()}")


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--staleness", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        return soak(Path(name), arguments.steps, arguments.kills, arguments.seed, arguments.staleness)


def soak(directory: Path, num_steps: int, num_kills: int, seed: int, staleness: int) -> int:
    files = make_files(directory, seed)
    files.reward.write_text(REWARD)

    def config(name: str) -> str:
        return CONFIG.format(
            name=name,
            directory=directory,
            model=files.model,
            prompts=files.prompts,
            reward=files.reward,
            num_prompts=num_steps * BATCH_SIZE,
            batch_size=BATCH_SIZE,
            group_size=GROUP_SIZE,
            num_samples=BATCH_SIZE * GROUP_SIZE,
            staleness=staleness,
        )

    console = Console(width=120, highlight=False)
    calm = Run(directory, "calm", config("calm"))
    first_s = calm.wait_for(1)
    pace_s = (calm.wait_for(num_steps) - first_s) / (num_steps - 1)
    calm.finish()
    console.print(f"without kills {pace_s:.2f} s per step, evaluation and checkpoints included")

    chance = random.Random(seed)
    kinds = [KINDS[number * len(KINDS) // num_kills % len(KINDS)] for number in range(num_kills)]
    chance.shuffle(kinds)
    moments = sorted(chance.randrange(1, num_steps - 1) for _ in kinds)
    started_s = time.monotonic()
    wild = Run(directory, "wild", config("wild"))
    costs: defaultdict[str, list[float]] = defaultdict(list)
    for moment, kind in zip(moments, kinds, strict=True):
        wild.wait_for(min(moment, num_steps - 1))
        time.sleep(chance.random() * pace_s)
        step = min(wild.step(), num_steps - 1)
        while not wild.kill(kind, chance):
            time.sleep(0.05)
        killed_s, left_s = time.monotonic(), max(0.0, pace_s - wild.since_step_s)
        cost_s = max(0.0, wild.wait_for(step + 1) - killed_s - left_s)
        costs[kind].append(cost_s)
        console.print(f"in step {step + 1:>3}: {kind} killed, {cost_s:.1f} s lost")
    wild.finish()
    seconds = time.monotonic() - started_s

    trained = {run: _trained(run.directory) for run in (calm, wild)}
    lost = sum((trained[calm] - trained[wild]).values())
    doubled = sum(count - 1 for count in trained[wild].values() if count > 1)
    strange = len(set(trained[wild]) - set(trained[calm]))
    ours, theirs = (load_file(run.directory / "model" / "model.safetensors") for run in (calm, wild))
    is_equal = all((ours[name] == theirs[name]).all() for name in ours)
    training_s = sum(record.get("step_s", 0.0) for record in read_lines(wild.metrics))
    restarts = Counter(event["kind"] for event in read_lines(wild.directory / "events.jsonl"))
    for kind in dict.fromkeys(KINDS):
        if each := costs[kind]:
            figures = f"{statistics.median(each):5.1f} s, at most {max(each):5.1f} s"
            console.print(f"{kind:<14} {len(each):>3} killed: {figures}")
    weights = "equal" if is_equal else "DIFFERENT" if staleness == 0 else "of another order"
    found = f"lost {lost}, doubled {doubled}, strange {strange}, weights {weights}"
    made = f"{num_kills} kills, {restarts['restart']} restarts, {restarts['start']} drivers"
    console.print(f"{wild.step()} steps, {made}: {found}, training {training_s / seconds:.0%} of {seconds:.0f} s")
    is_fine = not lost and not doubled and not strange and (is_equal or staleness > 0) and len(trained[wild]) > 0
    return 0 if is_fine and wild.step() == num_steps else 1


def _trained(run_dir: Path) -> Counter[str]:
    entries = [entry for entry in read_ledger(run_dir) if entry.state == "trained"]
    return Counter(str(key) for entry in entries for key in entry.keys)


if __name__ == "__main__":
    sys.exit(main())
