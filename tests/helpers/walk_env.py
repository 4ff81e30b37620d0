"""A family in one file: a walk on a line towards a goal, with a vector as state. Test cases make it die or hang."""

import os
import signal
import time
from pathlib import Path

import numpy as np

from hotseat.envs.simulator import ActionSpec, Observation, Simulator, SimulatorStep, Task

GOALS = {"left": -1.0, "right": 1.0}


def make(tasks, max_steps=None, trouble=None, folder=None, is_on_device=False, deaths=()):
    walk = Walk(list(tasks) or list(GOALS), max_steps or 12, trouble, folder)
    walk.deaths = [tuple(each) for each in deaths]
    walk.is_on_device = is_on_device
    return walk


class Walk(Simulator):
    is_on_device = False
    deaths = ()  # (seed, action) at which its process is killed, once each

    def __init__(self, tasks, max_steps, trouble, folder):
        self.tasks = [Task(index, name) for index, name in enumerate(tasks)]
        self.action = ActionSpec((-1.0, -1.0), (1.0, 1.0))
        self.state_bounds = (np.full(3, -4.0, dtype=np.float32), np.full(3, 4.0, dtype=np.float32))
        self._max_steps = max_steps
        self._trouble = trouble  # (kind, seed, action, times)
        self._folder = folder

    def reset(self, task, seed):
        self._goal = GOALS[self.tasks[task].name]
        self._seed, self._num_steps = seed, 0
        self._noise = np.random.default_rng(seed)
        self._place = self._noise.normal(size=2) * 0.1
        return self._seen()

    def step(self, action):
        self._meet_trouble()
        self._num_steps += 1
        self._place = self._place + 0.25 * action + 0.05 * self._noise.normal(size=2)
        arrived = bool(abs(self._place[0] - self._goal) < 0.3)
        is_last = self._num_steps == self._max_steps
        return SimulatorStep(self._seen(), float(arrived) - 0.01, arrived, is_last and not arrived, arrived)

    def render(self):
        picture = np.zeros((8, 8, 3), dtype=np.uint8)
        picture[3, int(np.clip(self._place[0] * 2 + 4, 0, 7))] = 255
        return picture

    def close(self):
        pass

    def _seen(self):
        state = np.array([*self._place, self._goal], dtype=np.float32)
        return Observation(instruction=f"walk to {self._goal:+.0f}", state=state)

    def _meet_trouble(self):
        if (self._seed, self._num_steps) in self.deaths:
            mark = Path(self._folder) / f"{self._seed}-{self._num_steps}"
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        if self._trouble is None or (self._seed, self._num_steps) != tuple(self._trouble[1:3]):
            return
        kind, *_, times = self._trouble
        before = Path(self._folder) / "times"
        count = len(before.read_text()) if before.exists() else 0
        if count >= times:
            return
        before.write_text("x" * (count + 1))
        if kind == "dies":
            os._exit(3)
        if kind == "raises":
            raise ValueError("the line is broken")
        time.sleep(3600)
