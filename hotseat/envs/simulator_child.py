"""The program of a child process: simulators, which the parent resets and steps over a channel.

Run by `processes/child.py`; the task has the descriptor of the memory for frames, or None. It imports the family, and
makes simulators once the parent says so: until then it takes no memory of a device. It answers each item of a command
by itself, in order, so that the parent sees which simulator takes too long; batches of worlds answer together. When the
channel ends, it closes its simulators and ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hotseat.envs.array_frames import ChildFrames
from hotseat.envs.family_loading import has_worlds, load_family
from hotseat.envs.simulator import Observation, Simulator, Worlds, WorldStep
from hotseat.errors import UserError
from hotseat.processes.child import FrameChannel
from hotseat.user_functions import described


def main(channel: FrameChannel, task: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    channel.codec = ChildFrames(task["memory"])
    _serve(channel)
    sys.stderr.flush()
    os._exit(0)  # all is closed: the interpreter would take a second to forget what Warp made


def _serve(channel: FrameChannel) -> None:
    with contextlib.ExitStack() as made, contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        settings, num_worlds = channel.receive()
        try:
            module = load_family(settings)
            channel.receive()  # the parent lets it take memory of its device
            is_batch, options = has_worlds(module), (list(settings.tasks), settings.max_steps)
            if is_batch:
                worlds: Worlds = module.make_worlds(*options, num_worlds, **settings.kwargs)
            else:
                worlds = _Separate(lambda: module.make(*options, **settings.kwargs))
        except UserError as error:
            channel.send(("refused", str(error)))
            return
        except EOFError:
            return
        except Exception as error:
            channel.send(("refused", f"env.path {settings.path}: {described(error)}"))
            return
        made.callback(worlds.close)
        facts = list(worlds.tasks), worlds.action, worlds.state_bounds, worlds.is_on_device
        channel.send(("made", (*facts, getattr(worlds, "num_state_values", None))))
        world_of: dict[int, int] = {}  # by slot: they get worlds as they are first used
        while True:
            name, items = channel.receive()
            # The parent sees which simulator takes too long; a batch answers together.
            for share in [items] if is_batch else [[item] for item in items]:
                where = [world_of.setdefault(slot, len(world_of)) for slot, *_ in share]
                for answer in _answers(worlds, name, where, [args for _, *args in share]):
                    channel.send(answer)


class _Separate(Worlds):
    """Simulators of one world each, as a batch. They are made when they are first used."""

    def __init__(self, make: Callable[[], Simulator]):
        self._make, self._made = make, [make()]
        first = self._made[0]
        self.tasks, self.action, self.state_bounds = first.tasks, first.action, first.state_bounds
        self.is_on_device, self.num_state_values = first.is_on_device, getattr(first, "num_state_values", None)

    def _of(self, world: int) -> Simulator:
        while len(self._made) <= world:
            self._made.append(self._make())
        return self._made[world]

    def reset(self, where: Sequence[int], tasks: Sequence[int], seeds: Sequence[int]) -> list[Observation | Exception]:
        return [self._of(world).reset(task, seed) for world, task, seed in zip(where, tasks, seeds, strict=True)]

    def step(self, where: Sequence[int], actions: np.ndarray) -> list[WorldStep | Exception]:
        return [_step(self._of(world), chunk) for world, chunk in zip(where, actions, strict=True)]

    def render(self, where: Sequence[int]) -> list[np.ndarray]:
        return [self._of(world).render() for world in where]

    def close(self) -> None:
        with contextlib.ExitStack() as closing:
            for simulator in self._made:
                closing.callback(simulator.close)


def _answers(worlds: Worlds, name: str, where: list[int], args: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the results of one call of worlds."""
    try:
        if name == "reset":
            results: Sequence[Any] = worlds.reset(where, [task for task, _ in args], [seed for _, seed in args])
        elif name == "render":
            results = worlds.render(where)
        else:
            results = worlds.step(where, np.stack([actions for (actions,) in args]))
        if len(results) != len(where):
            raise ValueError(f"{name} returned {len(results)} results for {len(where)} worlds")
    except Exception as error:
        results = [error] * len(where)
    for result in results:
        if isinstance(result, Exception):
            yield "failed", described(result)
        elif isinstance(result, WorldStep):
            is_late = result.truncated and not result.terminated  # the last step allowed may have ended the task
            yield "done", (result.seen, result.rewards, result.terminated, is_late, result.success)
        else:
            yield "done", result


def _step(simulator: Simulator, actions: np.ndarray) -> WorldStep:
    """Carry out actions until one ends the episode: [K, D]."""
    rewards: list[float] = []
    for action in actions:
        step = simulator.step(action)
        rewards.append(step.reward)
        if step.terminated or step.truncated:
            break
    return WorldStep(step.seen, rewards, step.terminated, step.truncated, step.success)
