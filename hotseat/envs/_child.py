"""The program of a child process: simulators, which the parent resets and steps over a pipe.

Started as `python -m hotseat.envs._child FD`. It answers each item of a command by itself, in order, so that the parent
sees which simulator takes too long. When the pipe ends, it closes its simulators and ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from hotseat.envs.loading import SimulatorSettings, make_simulator
from hotseat.envs.simulator import Seen, Simulator
from hotseat.errors import UserError


def main(descriptor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    connection = Connection(descriptor)
    settings: SimulatorSettings = connection.recv()
    simulators: dict[int, Simulator] = {}
    with contextlib.ExitStack() as made, contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):

        def make() -> Simulator:
            simulator = make_simulator(settings)
            made.callback(simulator.close)
            return simulator

        try:
            first = make()
        except UserError as error:
            connection.send(("refused", str(error)))
            return
        except Exception as error:
            connection.send(("refused", f"env.path {settings.path}: {_describe(error)}"))
            return
        num_values = getattr(first, "num_state_values", None)
        facts = (list(first.tasks), first.action, first.state_bounds, first.is_on_device, num_values)
        connection.send(("made", facts))
        spare: list[Simulator] = [first]
        while True:
            name, items = connection.recv()
            for slot, *args in items:
                try:
                    if slot not in simulators:
                        simulators[slot] = spare.pop() if spare else make()
                    answer: Any = _answer(simulators[slot], name, args)
                except Exception as error:
                    connection.send(("failed", _describe(error)))
                else:
                    connection.send(("done", answer))


def _answer(simulator: Simulator, name: str, args: list[Any]) -> Any:
    if name == "reset":
        return simulator.reset(*args)
    if name == "render":
        return simulator.render()
    return _step(simulator, args[0])


def _step(simulator: Simulator, actions: np.ndarray) -> tuple[Seen, list[float], bool, bool, bool | None]:
    """Carry out actions until one ends the episode: [K, D]. What ends with the last step allowed is not truncated."""
    rewards: list[float] = []
    for action in actions:
        step = simulator.step(action)
        rewards.append(step.reward)
        if step.terminated or step.truncated:
            break
    return step.seen, rewards, step.terminated, step.truncated and not step.terminated, step.success


def _describe(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({os.path.basename(frame.filename)}:{frame.lineno})"


if __name__ == "__main__":
    main(int(sys.argv[1]))
