"""Handle of a run that a script has started: it is watched step by step, and steered between steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hotseat.errors import HotseatError, RunError, UserError
from hotseat.loop.steering import Steering
from hotseat.script.notebook import NotebookView, in_notebook
from hotseat.script.run_files import Run

if TYPE_CHECKING:
    from hotseat.config import Config
    from hotseat.loop.state.saving import Saver
    from hotseat.observe import LiveView
    from hotseat.script.callbacks import Callback
    from hotseat.script.objects import ScriptObjects


_one_run = threading.Lock()  # held while a run is under way


def _end_before_the_interpreter(run: LiveRun) -> None:
    """Have a program that reaches its end, or fails, wait until the run has finished its step and saved it."""

    def end() -> None:
        if run.is_running:
            run.say("the program ends, so the run ends after its current step")
            run.stop()
            with suppress(BaseException):  # of the run; the program ends for another reason
                run.wait()

    # Those of `atexit` come too late: by then nothing can be started in a thread any more.
    threading._register_atexit(end)  # type: ignore[attr-defined]


class LiveRun(Run):
    """A run under way, or ended. `for metrics in run:` yields the metrics of each step as they come."""

    error: BaseException | None
    _steering: _ScriptSteering

    def __init__(self, config: Config, objects: ScriptObjects, callbacks: Sequence[Callback]):
        super().__init__(Path(config.run_dir) / str(config.name))
        self.error = None
        self._steering = _ScriptSteering(self, config, objects, callbacks)
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        return not self._steering.is_over

    def wait(self, timeout_s: float | None = None) -> Self:
        """Wait for the end, and return the run. Raises what the run failed with, or TimeoutError if it takes longer."""
        if not self._steering.wait(timeout_s):
            raise TimeoutError(f"{self.path} has not ended within {timeout_s:g} s")
        if self.error is not None:
            raise self.error
        return self

    def stop(self) -> None:
        """Have the run end once its current step is finished and saved. `hotseat resume` continues it."""
        self._steering.stop()

    def finish(self) -> None:
        """Have the run end after its current step as after its last one: it is saved, and its model exported."""
        self._steering.finish()

    def change(self, *overrides: str) -> None:
        """Change options of the run after its current step: `run.change("actor.optimizer.learning_rate=1e-6")`.

        The step is saved, and the run resumes from that checkpoint, which takes as long as a start. What may change is
        what may change when a run resumes (`hotseat resume --help`); anything else raises `UserError`.
        """
        self._steering.change(overrides)

    def say(self, text: str) -> None:
        """Print a line, and record it as an event of the run."""
        self._steering.say(text)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield a dict of metrics for each step, also for those before; raise what the run failed with."""
        at = 0
        while (line := self._steering.line(at)) is not None:
            yield dict(line)
            at += 1
        if self.error is not None:
            raise self.error

    def __repr__(self) -> str:
        return f"LiveRun({str(self.path)!r}, {'running' if self.is_running else 'ended'})"

    def _take_the_process(self) -> None:
        """Raise `UserError` if another run is under way in this process, whose cluster and clock are of one run."""
        if not _one_run.acquire(blocking=False):
            raise UserError("another run is under way in this process: `run.wait()` for its end, or `run.stop()` it")

    def begin(self, train: Callable[[Config, Steering], object]) -> Self:
        """Train in a thread of its own. train: trains a config to its end."""
        self._take_the_process()
        _end_before_the_interpreter(self)
        name = f"run {self.path.name}"
        self._thread = threading.Thread(target=self._steering.train, args=(train,), name=name, daemon=True)
        self._thread.start()
        return self

    def train(self, train: Callable[[Config, Steering], object]) -> Self:
        """Train in this thread."""
        self._take_the_process()
        self._steering.train(train)
        return self.wait()


class _ScriptSteering(Steering):
    """Callbacks and requests of a script. The run's thread calls what `Steering` has, any thread the rest."""

    def __init__(self, run: LiveRun, config: Config, objects: ScriptObjects, callbacks: Sequence[Callback]):
        self._run, self._config, self._objects, self._callbacks = run, config, objects, callbacks
        self._lines: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._saver: Saver | None = None
        self._say: Callable[[str], object] = print
        self._overrides: list[str] = []
        self._is_stopping = self._is_finishing = self._has_begun = False
        self._checkpoint: int | None = None  # step of the last one that callbacks have seen
        self._view = NotebookView(config.task).__enter__() if in_notebook() else None  # in the cell that is run now
        self.is_over = False

    # --- the run's thread ---------------------------------------------------------------------------------------------

    def train(self, train: Callable[[Config, Steering], object]) -> None:
        """Train to the end, starting again with what was changed; keep the error for those who wait."""
        try:
            while self._trained(train):
                self._config = self._resumed()
        except BaseException as error:
            self._run.error = error
        try:
            self._see_checkpoints()
            for callback in self._callbacks:
                self._call(callback.on_end, self._run)
        except BaseException as error:
            self._run.error = self._run.error or error
        finally:
            _one_run.release()
            with self._changed:
                self.is_over = True
                self._changed.notify_all()

    def _trained(self, train: Callable[[Config, Steering], object]) -> bool:
        """Train; return whether the run is to be resumed with changed options."""
        try:
            train(self._config, self)
        except KeyboardInterrupt:
            if not self._is_stopping:
                raise
        return bool(self._overrides) and self._is_stopping

    def _resumed(self) -> Config:
        from hotseat.checks.run_directory import CONFIG
        from hotseat.config import loads_saved

        overrides, self._overrides, self._is_stopping, self._saver = self._overrides, [], False, None
        return loads_saved((self._run.path / CONFIG).read_text(), [*overrides, "checkpoint.resume=true"])

    def view(self, title: str) -> LiveView | None:
        return self._view

    def command(self) -> str | None:
        if not self._objects:
            return None
        return f'the same call of hotseat.run, with name: {self._run.path.name} and "checkpoint.resume=true"'

    def begin(self, run_dir: Path, saver: Saver, say: Callable[[str], object]) -> None:
        self._say = say
        for note in self._objects.notes:
            say(note)
        self._objects.record(run_dir, say)
        if not self._has_begun:
            self._has_begun = True
            self._checkpoint = saver.last_step()
            for callback in self._callbacks:
                self._call(callback.on_start, self._run)
        with self._changed:
            self._saver = saver
            is_stopping = self._is_stopping
        if is_stopping:
            raise KeyboardInterrupt  # before the first step

    def stepped(self, step: int, metrics: Mapping[str, Any]) -> Mapping[str, float]:
        added: dict[str, float] = {}
        for callback in self._callbacks if step > 0 else ():
            values = self._call(callback.on_step, self._run, step, {**metrics, **added}) or {}
            if not (isinstance(values, Mapping) and all(isinstance(each, int | float) for each in values.values())):
                raise RunError(f"{_name(callback)}.on_step returned {values!r}: return a dict of numbers, or nothing")
            taken = [name for name in values if name in metrics or name in added]
            if taken:
                raise RunError(f"{_name(callback)}.on_step returned {taken[0]!r}, which is a metric already: rename it")
            added |= values
        line = {"step": step, **metrics, **added}
        if any(name.startswith("eval/") for name in metrics):
            for callback in self._callbacks:
                self._call(callback.on_evaluation, self._run, step, line)
        self._see_checkpoints()
        with self._changed:
            self._lines = [each for each in self._lines if each["step"] < step] + [line]
            self._changed.notify_all()
        self._ask()
        return added

    def _see_checkpoints(self) -> None:
        if self._saver is None:
            return
        step = self._saver.last_step()
        if step is not None and step != self._checkpoint:
            self._checkpoint = step
            for callback in self._callbacks:
                self._call(callback.on_checkpoint, self._run, step, self._saver.path(step))

    def _call(self, moment: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return moment(*arguments)
        except (HotseatError, KeyboardInterrupt):
            raise
        except Exception as error:
            name = f"{_name(moment.__self__)}.{moment.__name__}"  # type: ignore[attr-defined]
            raise RunError(f"{name} raised {type(error).__name__}: {error}") from error

    # --- any thread ---------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        self._is_stopping = True
        self._ask()

    def finish(self) -> None:
        self._is_finishing = True
        self._ask()

    def change(self, overrides: Sequence[str]) -> None:
        from hotseat.config import loads_saved, to_saved
        from hotseat.config.changes import changes_between

        if self.is_over:
            raise UserError("the run has ended: call hotseat.run with its name, the change and checkpoint.resume=true")
        saved = to_saved(self._config)
        config = loads_saved(saved, [*self._overrides, *overrides])
        changes_between(saved, config)
        section = config.checkpoint
        if section.every is None and section.minutes is None:
            raise UserError(
                "options can only change by way of a checkpoint: set checkpoint.every or checkpoint.minutes"
            )
        self._overrides += overrides
        self.stop()

    def say(self, text: str) -> None:
        self._say(text)

    def wait(self, timeout_s: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.is_over, timeout_s)

    def line(self, at: int) -> dict[str, Any] | None:
        """Wait for the metrics of a step, by its place, and return them; None if the run ends before."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._lines) > at or self.is_over)
            return self._lines[at] if len(self._lines) > at else None

    def _ask(self) -> None:
        """Pass on requests to stop to the saver, which decides after each step whether the run continues."""
        with self._changed:
            saver = self._saver
        if saver is not None and self._is_stopping:
            saver.stop_after_step()
        if saver is not None and self._is_finishing:
            saver.end_after_step()


def _name(callback: object) -> str:
    return type(callback).__name__
