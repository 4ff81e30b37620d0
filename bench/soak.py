"""A soak: a run on Ray whose processes are killed at random, against the same run left alone.

Engine, trainer ranks, reward worker, agent host and driver get `kill -9` at random moments. What can be replaced is
replaced by the run itself; when a trainer rank or the driver has died, `hotseat resume` goes on. Then every sample is
looked up in both ledgers, and the weights are compared bit by bit. "Training" is the time of the steps that count in
the end; the rest went into steps that were made twice, starting processes and loading.

    python bench/soak.py [--steps 100] [--kills 25] [--seed 0]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from safetensors.torch import load_file

from hotseat.demo import make_files
from hotseat.faults import VARIABLE
from hotseat.loop.rl.ledger import read_ledger
from hotseat.observe import read_lines

VICTIMS = {
    "engine": ("rollout:0",),
    "trainer rank": ("actor:0", "actor:1"),
    "reward worker": ("rewards",),
    "agent host": ("agents:0",),
    "driver": ("driver",),
}
BATCH_SIZE, GROUP_SIZE = 16, 8
MAX_STARTS = 60

CONFIG = """
task: rl
name: {name}
run_dir: {directory}
cluster: {{component_placement: {{actor: 0-1, rollout: 2}}}}
actor: {{model: {model}, optimizer: {{learning_rate: 1e-3, schedule: constant}}}}
data: {{path: {prompts}, label_key: label, max_length: 24, max_samples: {num_prompts}}}
reward: {{function: {reward}}}
rollout: {{batch_size: {batch_size}, samples_per_prompt: {group_size}, max_new_tokens: 6}}
train: {{dtype: fp32, batch_size: {num_samples}, micro_batch_size: 32}}
checkpoint: {{every: 2, keep_last: 2}}
log: {{every: 1000}}
"""


# Something to learn for a model that knows nothing yet, so that every step moves the weights.
REWARD = """
def reward_func(queries, prompts, labels):
    return [float(query[len(prompt):].count("7")) for query, prompt in zip(queries, prompts)]
"""


class Run:
    """A run in a process of its own, started again as often as it takes."""

    def __init__(self, directory: Path, name: str, text: str):
        self.directory = directory / name
        self.metrics = self.directory / "metrics.jsonl"
        self._config = directory / f"{name}.yaml"
        self._config.write_text(text)
        self._pids = directory / f"{name}-processes"
        self._pids.mkdir()
        self._log = (directory / f"{name}.log").open("ab")
        self.num_starts = 0
        self.start()

    def start(self) -> None:
        if self.num_starts > MAX_STARTS:
            raise RuntimeError(f"{self.directory} does not come to its end:\n{self._tail()}")
        command = ["run", str(self._config), *(["checkpoint.resume=true"] if self.num_starts else [])]
        self.num_starts += 1
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hotseat.cli.main", *command],
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, VARIABLE: str(self._pids)},
        )

    def _tail(self) -> str:
        return "\n".join(Path(self._log.name).read_text(errors="replace").splitlines()[-20:])

    def step(self) -> int:
        return read_lines(self.metrics)[-1]["step"] if self.metrics.exists() and read_lines(self.metrics) else 0

    def go_on_until(self, step: int) -> bool:
        """Wait for a moment of the run, starting it again if it has ended. False: it is done."""
        while self.step() < step:
            code = self.process.poll()
            if code == 0:
                return False
            if code is not None:
                if self.num_starts == 1 and not self.metrics.exists():
                    raise RuntimeError(f"{self.directory} does not start:\n{self._tail()}")
                self.start()
            time.sleep(0.02)
        return True

    def kill(self, who: str) -> bool:
        """False: it is not there at this moment."""
        try:
            pid = self.process.pid if who == "driver" else int((self._pids / f"{who}.pid").read_text())
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, FileNotFoundError):
            return False
        return True

    def finish(self) -> None:
        self.go_on_until(sys.maxsize)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        return soak(Path(name), arguments.steps, arguments.kills, arguments.seed)


def soak(directory: Path, num_steps: int, num_kills: int, seed: int) -> int:
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
        )

    console = Console(width=120, highlight=False)
    calm = Run(directory, "calm", config("calm"))
    calm.finish()
    chance = random.Random(seed)
    moments = sorted(chance.uniform(1, num_steps - 1) for _ in range(num_kills))
    started_s = time.monotonic()
    wild = Run(directory, "wild", config("wild"))
    killed: Counter[str] = Counter()
    # Each kind as often as the others, in random order.
    kinds = [list(VICTIMS)[number % len(VICTIMS)] for number in range(num_kills)]
    chance.shuffle(kinds)
    for moment, kind in zip(moments, kinds, strict=True):
        while True:
            wild.go_on_until(int(moment))
            time.sleep(chance.random())
            if wild.kill(chance.choice(VICTIMS[kind])):
                break
        killed[kind] += 1
        console.print(f"step {wild.step():>3}: {kind} killed")
    wild.finish()
    seconds = time.monotonic() - started_s

    trained = {run: _trained(run.directory) for run in (calm, wild)}
    lost = sum((trained[calm] - trained[wild]).values())
    doubled = sum(count - 1 for count in trained[wild].values() if count > 1)
    strange = len(set(trained[wild]) - set(trained[calm]))
    ours, theirs = (load_file(run.directory / "model" / "model.safetensors") for run in (calm, wild))
    is_equal = all((ours[name] == theirs[name]).all() for name in ours)
    training_s = sum(record.get("step_s", 0.0) for record in read_lines(wild.metrics))
    kills = ", ".join(f"{kind} {count}" for kind, count in sorted(killed.items()))
    console.print(
        f"{wild.step()} steps, {killed.total()} kills ({kills}), {wild.num_starts - 1} resumes: lost {lost}, doubled"
        f" {doubled}, strange {strange}, weights {'equal' if is_equal else 'DIFFERENT'}, training"
        f" {training_s / seconds:.0%} of {seconds:.0f} s"
    )
    is_fine = not lost and not doubled and not strange and is_equal and len(trained[wild]) > 0
    return 0 if is_fine and wild.step() == num_steps else 1


def _trained(run_dir: Path) -> Counter[str]:
    entries = [entry for entry in read_ledger(run_dir) if entry.state == "trained"]
    return Counter(str(key) for entry in entries for key in entry.keys)


if __name__ == "__main__":
    sys.exit(main())
