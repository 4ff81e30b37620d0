"""When a run saves itself, what it saves, and how it goes on from there."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from hotseat import faults
from hotseat.config import Config, loads, to_yaml
from hotseat.errors import CheckpointError, UserError
from hotseat.loop.checkpoints import Checkpoint, CheckpointStore
from hotseat.observe import Journal

BACKEND = "actor"  # folder of a checkpoint that holds what the training backend saved
MODEL = "model"  # folder of a checkpoint that holds a Hugging Face model

# What may be another when a run goes on: it changes where, how fast or how loud, and nothing that is learned.
FREE = (
    "name",
    "run_dir",
    "cluster",
    "log",
    "eval",
    "checkpoint",
    "agent.max_concurrent",
    "agent.timeout_s",
    "train.spike_factor",
    "train.on_spike",
    "reward.timeout_s",
    "reward.retries",
    "reward.max_failed_fraction",
    "reward.max_memory_gib",
    "rollout.num_slots",
    "rollout.micro_batch_size",
    "rollout.max_tokens_per_device",
    "train.micro_batch_size",
    "train.max_tokens_per_device",
)


@dataclass(frozen=True)
class Parts:
    """What a task has to save, as calls to its groups."""

    num_bytes: Callable[[], int]  # that `write` will need
    write: Callable[[Path], object]  # into the checkpoint's folder; the backend's into `BACKEND` there
    export: Callable[[Path], object]
    state: Callable[[], Mapping[str, Any]]  # facts of the loop, as JSON


class Saver:
    """Writes checkpoints as the config asks, and finds the one to go on from."""

    def __init__(self, config: Config, run_dir: Path):
        section = config.checkpoint
        self._config = config
        self.is_stopping = False  # after the step that is under way
        self._store = CheckpointStore(
            Path(section.path) if section.path else run_dir / "checkpoints",
            keep_last=section.keep_last,
            max_bytes=None if section.max_gib is None else int(section.max_gib * 2**30),
        )

    def find(self, stack: ExitStack, say: Callable[[str], object]) -> Checkpoint | None:
        """The checkpoint to go on from, if the run is to go on and there is one. Nobody else may write here then."""
        if not (self.can_save or self._config.checkpoint.resume):
            return None
        self._store.prepare()
        if self._config.checkpoint.path is not None:
            stack.enter_context(sole_owner(self._store.directory))
        for name in self._store.clean():
            say(f"{name} was not finished, and is removed")
        if not self._config.checkpoint.resume:
            if self._store.steps():
                raise UserError(
                    f"{self._store.directory} holds checkpoints of another run: set checkpoint.resume=true to go on"
                    " from them, or checkpoint.path to another place"
                )
            return None
        found = self._store.newest()
        if found is None:
            say(f"{self._store.directory} has no checkpoint to go on from: this run starts anew")
            return None
        if not (found.path / BACKEND).is_dir():
            raise CheckpointError(
                f"{found.path} holds a model but not what resuming needs (it was written with"
                " checkpoint.save_state=false): start anew with that model"
            )
        for note in compare(str(found.state["config"]), self._config):
            say(note)
        say(f"going on from {found.path}, after step {found.step}")
        return found

    def last_step(self) -> int | None:
        """Of the newest checkpoint that can be gone on from."""
        steps = self._store.steps() if self._config.checkpoint.save_state else []
        return steps[-1] if steps else None

    @property
    def can_save(self) -> bool:
        """Whether the config asks for checkpoints."""
        return self._config.checkpoint.every is not None

    def after_step(self, step: int, parts: Parts, evaluation: Mapping[str, float], journal: Journal) -> None:
        """Save if it is time to, or if the run is asked to stop; then stop."""
        every = self._config.checkpoint.every
        if every is not None and (step % every == 0 or self.is_stopping):
            journal.phase("save")
            path = self.save(step, parts, evaluation)
            if self.is_stopping:
                journal.say(f"saved {path}")
        if self.is_stopping:
            raise KeyboardInterrupt

    def save(self, step: int, parts: Parts, evaluation: Mapping[str, float]) -> Path:
        """Everything that going on after `step` needs, in one checkpoint."""
        section = self._config.checkpoint
        has_model = section.export_each or not section.save_state
        faults.reach("save.before")
        with self._store.writing(step, parts.num_bytes() if section.save_state else 0) as path:
            if section.save_state:
                parts.write(path)
            if has_model:
                parts.export(path / MODEL)
        state = {
            "step": step,
            "task": self._config.task,
            "config": to_yaml(self._config),
            "best_metric": _best(section.best_metric, evaluation),
            **parts.state(),
        }
        return self._store.commit(step, state)


def _best(name: str | None, evaluation: Mapping[str, float]) -> float | None:
    if name == "none" or not evaluation:
        return None
    if name is None:
        name = "eval/accuracy" if "eval/accuracy" in evaluation else next(iter(evaluation))
    value = evaluation.get(name, evaluation.get(f"eval/{name}"))
    if value is None:
        raise UserError(f"checkpoint.best_metric {name!r} was not measured; there are {', '.join(evaluation)}")
    return -value if name.endswith("loss") else value


def compare(saved: str, config: Config) -> list[str]:
    """What has changed since a checkpoint was written, a line each. What cannot change is an error."""
    then, now = _flat(loads(saved).model_dump(mode="json")), _flat(config.model_dump(mode="json"))
    notes, refused = [], []
    for key in now:
        if then.get(key) == now[key]:
            continue
        line = f"{key}: {then.get(key)} when the checkpoint was written, now {now[key]}"
        is_free = any(key == free or key.startswith(f"{free}.") for free in FREE)
        (notes if is_free else refused).append(line)
    if refused:
        raise UserError(
            "this run cannot go on with another config:\n"
            + "\n".join(f"  {line}" for line in refused)
            + "\nset them back, or start a new run"
        )
    return [note for note in notes if not note.startswith(("checkpoint.resume:", "name:", "run_dir:"))]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


@contextmanager
def sole_owner(run_dir: Path) -> Iterator[None]:
    """Holds the directory for this process, until it ends in whatever way."""
    with (run_dir / ".lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{run_dir} is in use by {_owner(file)}: wait for it, or choose another name") from None
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        yield


def _owner(file: TextIO) -> str:
    file.seek(0)
    return file.read() or "another run"
