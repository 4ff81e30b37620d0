"""The walk of `walk_env.py` in batches of worlds."""

from walk_env import make

from hotseat.envs.simulator import Worlds
from hotseat.envs.simulator_child import _step


def make_worlds(tasks, max_steps, num_worlds, **kwargs):
    return Walks([make(tasks, max_steps, **kwargs) for _ in range(num_worlds)])


class Walks(Worlds):
    def __init__(self, walks):
        self._walks = walks
        self.tasks, self.action, self.state_bounds = walks[0].tasks, walks[0].action, walks[0].state_bounds
        self.is_on_device = walks[0].is_on_device

    def reset(self, where, tasks, seeds):
        return [self._walks[world].reset(task, seed) for world, task, seed in zip(where, tasks, seeds, strict=True)]

    def step(self, where, actions):
        return [self._carry_out(self._walks[world], chunk) for world, chunk in zip(where, actions, strict=True)]

    def _carry_out(self, walk, chunk):
        try:
            return _step(walk, chunk)
        except ValueError as error:
            return error

    def render(self, where):
        return [self._walks[world].render() for world in where]

    def close(self):
        pass
