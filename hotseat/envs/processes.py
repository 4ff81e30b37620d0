"""Simulators in child processes: any family as an `Env`.

A process that dies or does not answer in time is ended and replaced, and its episodes are played again from their seeds
and actions. Each replayed answer must be the one that was given before, bit for bit. The same call of the same
simulator may fail so `MAX_ATTEMPTS` times; after that its episode fails, and the others go on. From the second time on,
worlds of a batch are asked one by one, so that the one that ends its process is found.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hotseat.closing import on_failure
from hotseat.envs.array_frames import ParentFrames, make_memory
from hotseat.envs.family_loading import SimulatorSettings
from hotseat.envs.simulator import ActionSpec, Observation, Task
from hotseat.errors import RunError, UserError
from hotseat.processes import ChildProcess, WorkerDied, WorkerTimeout, exit_words
from hotseat.types import Moved

MAX_ATTEMPTS = 3
_PROGRAM = Path(__file__).with_name("simulator_child.py")
_START_S = 600.0  # until a new process answers, which may have to compile its simulators
_CLOSE_S = 10.0  # how long simulators may take to close


class SimulatorError(RunError):
    """A simulator failed, and with it its episode."""


@dataclass(frozen=True)
class Outcome:
    """Results of a chunk of actions, for `n` simulators. Nothing acts after an episode's end.

    Rewards of actions that were not carried out are 0. failures: why a simulator gave no result, by its slot; its rows
    are zeros, and its episode has ended.
    """

    seen: Sequence[Observation | None]  # n, after the last action that was carried out; None: failed
    rewards: np.ndarray  # [n, K] float64
    num_taken: np.ndarray  # [n] int64: actions that were carried out
    terminated: np.ndarray  # [n] bool
    truncated: np.ndarray  # [n] bool
    success: np.ndarray  # [n] bool
    is_success_known: np.ndarray  # [n] bool: the simulator says whether the task is accomplished
    failures: Mapping[int, str]


@dataclass
class _Episode:
    """Record of a slot since its reset: enough to play it again. digests: of every answer."""

    task: int
    seed: int
    actions: list[np.ndarray] = field(default_factory=list)  # [K, D] each
    digests: list[bytes] = field(default_factory=list)


class ProcessEnv:
    """Simulators of one family in numbered slots, which `num_processes` children get in turn.

    A slot's results depend on its own task, seed and actions only. Calls are made from one thread at a time, and each
    one ends: what takes too long is ended and named. `tests/helpers/simulator_conformance.py` checks all this.

    timeout_s: of each reset and each chunk of actions. say: called with a sentence about each process that is replaced.
    """

    tasks: Sequence[Task]
    action: ActionSpec
    state_bounds: tuple[np.ndarray, np.ndarray] | None
    num_state_values: int | None  # most values of an entry of the state that numbers things
    is_on_device: bool  # the simulators hold memory of an accelerator

    def __init__(
        self,
        settings: SimulatorSettings,
        num_envs: int,
        *,
        num_processes: int = 1,
        timeout_s: float = 60.0,
        say: Callable[[str], object] = lambda text: None,
    ):
        self.num_envs = num_envs
        self.num_replaced = 0
        self._settings = settings
        self._timeout_s = timeout_s
        self._say = say
        self._episodes: dict[int, _Episode] = {}
        self._is_offloaded = False  # its children then wait for `onload` to make their simulators
        num_processes = min(num_processes, num_envs)
        self._num_worlds = -(-num_envs // num_processes)  # of each process at most
        self._children = [self._spawn() for _ in range(num_processes)]
        with on_failure(self.close):
            for child in self._children:
                self._meet(child)

    # --- the contract -------------------------------------------------------------------------------------------------

    def reset(self, where: Sequence[int], tasks: Sequence[int], seeds: Sequence[int]) -> list[Observation | Exception]:
        """Begin episodes in these slots, whatever was in them; an entry per slot."""
        for slot, task, seed in zip(where, tasks, seeds, strict=True):
            assert 0 <= task < len(self.tasks), f"task {task}, {len(self.tasks)} tasks"
            self._episodes[slot] = _Episode(task, seed)
        answers = self._ask("reset", dict.fromkeys(where, ()))
        return [answers[slot] for slot in where]

    def step(self, where: Sequence[int], actions: np.ndarray) -> Outcome:
        """Carry out a chunk of actions in these slots: [n, K, D] float64."""
        assert actions.ndim == 3, f"actions {actions.shape}, not [n, K, D]"
        assert actions.shape[0] == len(where), f"actions {actions.shape} for {len(where)} slots"
        assert actions.shape[2] == self.action.dim, f"actions {actions.shape}, {self.action.dim} numbers each"
        for slot, chunk in zip(where, actions, strict=True):
            assert slot in self._episodes, f"no episode in slot {slot}"
            self._episodes[slot].actions.append(np.array(chunk, dtype=np.float64))
        answers = self._ask("step", {slot: (self._episodes[slot].actions[-1],) for slot in where})
        rewards = np.zeros(actions.shape[:2])
        num_taken = np.zeros(len(where), dtype=np.int64)
        flags = np.zeros((4, len(where)), dtype=bool)
        seen: list[Observation | None] = []
        failures = {}
        for row, slot in enumerate(where):
            answer = answers[slot]
            if isinstance(answer, Exception):
                failures[slot] = str(answer)
                seen.append(None)
                continue
            after, values, terminated, truncated, success = answer
            seen.append(after)
            rewards[row, : len(values)] = values
            num_taken[row] = len(values)
            flags[:, row] = terminated, truncated, bool(success), success is not None
        return Outcome(seen, rewards, num_taken, flags[0], flags[1], flags[2], flags[3], failures)

    def snapshot(self) -> bytes:
        """Return the state of all slots."""
        return pickle.dumps(self._episodes)

    def restore(self, state: bytes) -> None:
        """Continue from a snapshot, of this or another object with as many slots."""
        self._episodes = pickle.loads(state)
        for index in range(len(self._children)):
            self._replay(index, self._mine(index, self._episodes))

    def render(self, where: Sequence[int]) -> list[np.ndarray]:
        """Return pictures for display: [H, W, 3] uint8 each."""
        answers = self._ask("render", dict.fromkeys(where, ()))
        for answer in answers.values():
            if isinstance(answer, Exception):
                raise answer
        return [answers[slot] for slot in where]

    def offload(self) -> Moved:
        """End the processes of simulators that hold memory of a device; others have nothing there.

        New processes import the family meanwhile, and take no memory of the device before `onload`.
        """
        started_s = time.monotonic()
        if self.is_on_device and not self._is_offloaded:
            self._is_offloaded = True
            self.close()
            self._children = [_Child(self._settings, self._num_worlds, is_standby=True) for _ in self._children]
        return Moved(0, 0, (time.monotonic() - started_s) * 1e3)

    def onload(self) -> Moved:
        started_s = time.monotonic()
        if self._is_offloaded:
            for child in self._children:
                child.begin()
            for index in range(len(self._children)):
                try:
                    self._replay(index, self._mine(index, self._episodes))
                except SimulatorError as error:
                    self._say(f"{error}; another process replaces it")
                    self._replace(index, "step", ())
            self._is_offloaded = False
        return Moved(0, 0, (time.monotonic() - started_s) * 1e3)

    def forget(self, where: Iterable[int]) -> None:
        """Drop the episodes of these slots, which have ended."""
        for slot in where:
            self._episodes.pop(slot, None)

    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    def close(self) -> None:
        """Have all simulators close, at the same time; end what takes too long, and the processes they started."""
        for child in self._children:
            child.hang_up()
        for child in self._children:
            child.end(_CLOSE_S)

    # --- children -----------------------------------------------------------------------------------------------------

    def _spawn(self) -> _Child:
        return _Child(self._settings, self._num_worlds)

    def _meet(self, child: _Child) -> None:
        """Wait until a new child has made its first simulator."""
        if child.is_met:
            return
        try:
            kind, answer = child.receive(_START_S)
        except (WorkerDied, WorkerTimeout) as error:
            why = f"did not start in {_START_S:g} s" if isinstance(error, WorkerTimeout) else "died"
            raise SimulatorError(f"a process of simulator {self._settings.path} {why} while it started") from None
        if kind == "refused":
            raise UserError(answer)
        child.is_met = True
        self.tasks, self.action, self.state_bounds, self.is_on_device, self.num_state_values = answer

    def _mine(self, index: int, slots: Any) -> list[int]:
        return [slot for slot in sorted(slots) if slot % len(self._children) == index]

    def _ask(self, name: str, items: dict[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Have children answer, all at the same time; replace those that do not."""
        assert not self._is_offloaded, "the simulators are offloaded"
        shares = {index: self._mine(index, items) for index in range(len(self._children))}
        for index, slots in shares.items():
            self._send(index, name, slots, items)
        answers: dict[int, Any] = {}
        for index, slots in shares.items():
            waiting, attempts = list(slots), 0
            failed = None  # the slot that the attempts are of
            asked = waiting[:]  # slots whose answers are on their way
            is_one_by_one = False  # which world of a batch ends the process is not known otherwise
            while waiting:
                problem = self._receive_all(index, name, asked, answers)
                waiting = [slot for slot in waiting if slot not in answers]
                if problem is not None:
                    slot = asked[0]
                    failed, attempts = slot, attempts + 1 if slot == failed else 1
                    self._say(f"{problem}; its process is replaced, and its episodes are played again")
                    if attempts >= MAX_ATTEMPTS:
                        answers[slot] = SimulatorError(f"{problem}, {attempts} times in a row")
                        self._episodes.pop(slot, None)
                        waiting.remove(slot)
                    is_one_by_one = is_one_by_one or attempts > 1
                    self._replace(index, name, waiting)
                asked = waiting[:1] if is_one_by_one else waiting[:]
                self._send(index, name, asked, items)
        return answers

    def _send(self, index: int, name: str, slots: Sequence[int], items: dict[int, tuple[Any, ...]]) -> None:
        if not slots:
            return
        episodes = self._episodes
        begun = {slot: (episodes[slot].task, episodes[slot].seed) for slot in slots}
        arguments = begun if name == "reset" else items
        with contextlib.suppress(WorkerDied, WorkerTimeout):  # whoever waits for the answer sees it
            self._children[index].send((name, [(slot, *arguments[slot]) for slot in slots]), self._timeout_s)

    def _receive_all(self, index: int, name: str, waiting: list[int], answers: dict[int, Any]) -> str | None:
        """Take answers for the slots that wait, which are removed from `waiting`; return what went wrong."""
        while waiting:
            slot = waiting[0]
            try:
                kind, answer = self._children[index].receive(self._timeout_s)
            except WorkerTimeout:
                return f"{self._name(slot, name)} did not answer in {self._timeout_s:g} s"
            except WorkerDied as died:
                how = "" if died.code is None else f" {'by' if died.code < 0 else 'with'} {exit_words(died.code)}"
                return f"{self._name(slot, name)}: its process died{how}"
            if kind == "failed":
                answers[slot] = SimulatorError(f"{self._name(slot, name)}: {answer}")
                self._episodes.pop(slot, None)
            else:
                answers[slot] = answer
                if name != "render":
                    self._episodes[slot].digests.append(_digest(answer))
            waiting.pop(0)
        return None

    def _name(self, slot: int, call: str) -> str:
        episode = self._episodes[slot]
        task = self.tasks[episode.task].name
        where = "in its reset" if call == "reset" else f"at action {sum(map(len, episode.actions[:-1]))}"
        return f"simulator {self._settings.path}, task {task}, seed {episode.seed}, {where}"

    def _replace(self, index: int, name: str, waiting: Sequence[int]) -> None:
        """Start another process, and play its episodes up to the call that `waiting` slots still wait for."""
        self.num_replaced += 1
        unfinished = set(waiting) if name != "render" else set()
        begun = [slot for slot in self._mine(index, self._episodes) if self._episodes[slot].digests]
        for attempt in range(1, MAX_ATTEMPTS + 1):
            self._children[index].end(0.0)
            self._children[index] = self._spawn()
            try:
                self._replay(index, begun, unfinished)
                return
            except SimulatorError as error:
                if attempt == MAX_ATTEMPTS:
                    raise
                self._say(str(error))

    def _replay(self, index: int, slots: Sequence[int], unfinished: Set[int] = frozenset()) -> None:
        """Play episodes again in a child that has none of them. unfinished: slots whose last action comes later."""
        child = self._children[index]
        self._meet(child)
        calls: dict[int, list[tuple[Any, ...]]] = {}  # arguments of the reset and of each step
        for slot in slots:
            episode = self._episodes[slot]
            calls[slot] = [(episode.task, episode.seed), *((chunk,) for chunk in episode.actions)]
        for slot in unfinished & calls.keys():
            calls[slot].pop()
        for at in range(max(map(len, calls.values()), default=0)):
            now = {slot: calls[slot][at] for slot in slots if at < len(calls[slot])}
            # A batch carries out chunks of one length at a time.
            for shape in dict.fromkeys(np.shape(args[-1]) for args in now.values()):
                items = {slot: args for slot, args in now.items() if np.shape(args[-1]) == shape}
                self._play_again(child, "step" if at else "reset", items, at)

    def _play_again(self, child: _Child, name: str, items: dict[int, tuple[Any, ...]], at: int) -> None:
        """Repeat one call of each of these slots. Raises if an answer differs from the one before."""
        with contextlib.suppress(WorkerDied, WorkerTimeout):  # `receive` reports it
            child.send((name, [(slot, *args) for slot, args in items.items()]), self._timeout_s)
        for slot in items:
            try:
                kind, answer = child.receive(self._timeout_s)
            except (WorkerDied, WorkerTimeout):
                raise SimulatorError(f"{self._name(slot, 'step')}: it died or hung while it was replayed") from None
            if kind == "failed" or _digest(answer) != self._episodes[slot].digests[at]:
                raise RunError(
                    f"{self._name(slot, 'step')}: played again from its seed and actions, it gave another result at"
                    f" call {at}: the simulator depends on more than task, seed and actions"
                )


class _Child(ChildProcess):
    """A process of simulators. is_standby: it imports the family, and makes its simulators after `begin`."""

    def __init__(self, settings: SimulatorSettings, num_worlds: int = 1, *, is_standby: bool = False):
        memory = make_memory()
        self._frames = ParentFrames(memory)
        self.is_met = False
        with on_failure(self._frames.close):
            super().__init__(
                _PROGRAM,
                {"memory": memory},
                command=(sys.executable, "-P"),
                stderr=None,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])},
                pass_fds=() if memory is None else (memory,),
                ending_s=5.0,
            )
        self.channel.codec = self._frames
        with contextlib.suppress(WorkerDied):  # `receive` reports a process that died at once
            self.send((settings, num_worlds))
        if not is_standby:
            self.begin()

    def begin(self) -> None:
        """Have the process make its simulators."""
        with contextlib.suppress(WorkerDied):  # `receive` reports a process that died
            self.send("begin")

    def end(self, grace_s: float = 0.0) -> int:
        code = super().end(grace_s)
        self._frames.close()
        return code


def _digest(answer: Any) -> bytes:
    """Hash everything that a simulator answered."""
    hashed = hashlib.blake2b(digest_size=16)

    def add(value: Any) -> None:
        if isinstance(value, np.ndarray):
            hashed.update(f"{value.dtype}{value.shape}".encode())
            hashed.update(np.ascontiguousarray(value).data)
        elif isinstance(value, Observation):
            for part in (value.instruction, value.text, value.state, value.image):
                add(part)
        elif isinstance(value, list | tuple):
            for part in value:
                add(part)
        else:
            hashed.update(repr(value).encode())

    add(answer)
    return hashed.digest()
