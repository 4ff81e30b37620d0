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
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hotseat.envs.array_frames import ChildFrames
from hotseat.envs.family_loading import has_worlds, load_family, make_one
from hotseat.envs.simulator import Observation, Simulator, Worlds, WorldStep
from hotseat.errors import UserError
from hotseat.processes.child import Channel


def main(channel: Channel, task: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    channel.codec = ChildFrames(task["memory"])
    _serve(channel)
    sys.stderr.flush()
    os._exit(0)  # all is closed: the interpreter would take a second to forget what Warp made


def _serve(channel: Channel) -> None:
    with contextlib.ExitStack() as made, contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        settings, num_worlds = channel.receive()
        try:
            module = load_family(settings)
            channel.receive()  # the parent lets it take memory of its device
            options = list(settings.tasks), settings.max_steps
            worlds: _Separate | _Batch
            if has_worlds(module):
                worlds = _Batch(module.make_worlds(*options, num_worlds, **settings.kwargs))
            else:
                worlds = _Separate(lambda: make_one(module, settings))
        except UserError as error:
            channel.send(("refused", str(error)))
            return
        except EOFError:
            return
        except Exception as error:
            channel.send(("refused", f"env.path {settings.path}: {_describe(error)}"))
            return
        made.callback(worlds.close)
        channel.send(("made", worlds.facts))
        while True:
            name, items = channel.receive()
            for answer in worlds.answers(name, items):
                channel.send(answer)


def _facts(of: Simulator | Worlds) -> tuple[Any, ...]:
    return list(of.tasks), of.action, of.state_bounds, of.is_on_device, getattr(of, "num_state_values", None)


class _Separate:
    """Simulators of one world each, made when their slot is first used."""

    def __init__(self, make: Callable[[], Simulator]):
        self._make = make
        self._simulators: dict[int, Simulator] = {}
        self._all = [make()]
        self._spare = list(self._all)
        self.facts = _facts(self._all[0])

    def answers(self, name: str, items: list[Any]) -> Iterator[tuple[str, Any]]:
        """Answer each item of a command by itself, in order."""
        for slot, *args in items:
            try:
                simulator = self._of(slot)
                if name == "step":
                    answer: Any = _step(simulator, args[0])
                else:
                    answer = simulator.reset(*args) if name == "reset" else simulator.render()
            except Exception as error:
                yield "failed", _describe(error)
            else:
                yield "done", answer

    def _of(self, slot: int) -> Simulator:
        if slot not in self._simulators:
            if not self._spare:
                self._spare.append(self._make())
                self._all.append(self._spare[0])
            self._simulators[slot] = self._spare.pop()
        return self._simulators[slot]

    def close(self) -> None:
        with contextlib.ExitStack() as closing:
            for simulator in self._all:
                closing.callback(simulator.close)


class _Batch:
    """A batch of worlds, which slots get as they are first used. One call carries out all items of a command."""

    def __init__(self, worlds: Worlds):
        self._worlds = worlds
        self._world_of: dict[int, int] = {}  # by slot
        self.facts = _facts(worlds)

    def answers(self, name: str, items: list[Any]) -> Iterator[tuple[str, Any]]:
        where = [self._world_of.setdefault(slot, len(self._world_of)) for slot, *_ in items]
        try:
            results = self._call(name, where, [args for _, *args in items])
            if len(results) != len(items):
                raise ValueError(f"{name} returned {len(results)} results for {len(items)} worlds")
        except Exception as error:
            results = [error] * len(items)
        for result in results:
            if isinstance(result, Exception):
                yield "failed", _describe(result)
            elif isinstance(result, WorldStep):
                is_late = result.truncated and not result.terminated
                yield "done", (result.seen, result.rewards, result.terminated, is_late, result.success)
            else:
                yield "done", result

    def _call(self, name: str, where: list[int], args: list[Any]) -> Sequence[Any]:
        if name == "reset":
            return self._worlds.reset(where, [task for task, _ in args], [seed for _, seed in args])
        if name == "render":
            return self._worlds.render(where)
        return self._worlds.step(where, np.stack([actions for (actions,) in args]))

    def close(self) -> None:
        self._worlds.close()


def _step(simulator: Simulator, actions: np.ndarray) -> tuple[Observation, list[float], bool, bool, bool | None]:
    """Carry out actions until one ends the episode: [K, D]. What ends with the last step allowed is not truncated."""
    rewards: list[float] = []
    for action in actions:
        step = simulator.step(action)
        rewards.append(step.reward)
        if step.terminated or step.truncated:
            break
    return step.seen, rewards, step.terminated, step.truncated and not step.terminated, step.success


def _describe(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:  # returned, not raised
        return f"{type(error).__name__}: {error}"
    frame = frames[-1]
    return f"{type(error).__name__}: {error} ({os.path.basename(frame.filename)}:{frame.lineno})"
