"""Ranks that a launcher started, without a driver: the first rank leads, and the others run the calls it sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from hotseat.cluster.group import name_of
from hotseat.config import Config
from hotseat.errors import HotseatError, RunError
from hotseat.loop.state.saving import CheckpointSource, Saver
from hotseat.observe import Journal

Result = TypeVar("Result")


class SharesFacts(Protocol):
    """Worker of one rank, which exchanges facts with the others. The first rank can call its methods on all ranks."""

    def share(self, fact: Any, what: str) -> list[Any]:
        """Gather every rank's fact, in rank order. All ranks call it."""


W = TypeVar("W", bound=SharesFacts)
P = ParamSpec("P")


class LedRanks(Generic[W]):
    """Lets the first rank lead the others through code that only one process may run.

    All ranks enter `led`. There the first rank runs the code, and `call`s methods on all ranks where it needs them; the
    others serve its calls until it is done. They raise what it raises, except for failures inside a call: in these each
    rank has an error of its own, or notices that the connection to the failed one is closed.
    """

    def __init__(self, worker: W, rank: int):
        self._worker = worker
        self.is_first = rank == 0
        self._has_failed_in_collective = False

    def led(self, do: Callable[[], Result]) -> Result:
        """Run `do` on the first rank alone, and return its result on every rank. All ranks call it."""
        if not self.is_first:
            return self._follow()
        try:
            result = do()
        except BaseException as error:
            if not self._has_failed_in_collective:
                self._broadcast("error", _sent(error))
            raise
        self._broadcast("result", result)
        return result

    def call(self, method: Callable[Concatenate[W, P], Result], *args: P.args, **kwargs: P.kwargs) -> list[Result]:
        """Call a method on all ranks, from the first one, inside `led`; return the results in rank order."""
        name = name_of(method)
        self._broadcast("call", (name, args, kwargs))
        return self._run(name, args, kwargs)

    def _follow(self) -> Any:
        while True:
            kind, message = self.each(None, "hear from the first rank")[0]
            if kind == "error":
                raise message
            if kind == "result":
                return message
            self._run(*message)

    def _run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        with self._collective():
            result = getattr(self._worker, method)(*args, **kwargs)
        return self.each(result, f"end {method!r}")

    def _broadcast(self, kind: str, message: Any) -> None:
        self.each((kind, message), "tell the other ranks")

    def each(self, fact: Any, what: str) -> list[Any]:
        """Gather every rank's fact, in rank order. All ranks call it."""
        with self._collective():
            return self._worker.share(fact, what)

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Remember a failure in a collective: the other ranks no longer listen for messages then."""
        try:
            yield
        except BaseException:
            self._has_failed_in_collective = True
            raise


def _sent(error: BaseException) -> BaseException:
    """Return an error to send to the other ranks: of the same type if it is one of ours, else a `RunError`."""
    if isinstance(error, HotseatError | KeyboardInterrupt):
        return type(error)(*error.args)
    return RunError(f"the first rank failed: {type(error).__name__}: {error}")


class LedSaver:
    """A `Saver` for several ranks: they agree on when to save, and the first one writes with the help of all."""

    def __init__(self, saver: Saver, ranks: LedRanks[Any]):
        self._saver = saver
        self._ranks = ranks
        saver.has_begun = True

    def metrics(self) -> dict[str, float]:
        return self._saver.metrics()

    def keep(self, config: Config) -> None:
        """Keep a config as `Saver.keep` does; only the first rank writes."""
        if self._ranks.is_first:
            self._saver.keep(config)

    def after_step(
        self, step: int, source: CheckpointSource, evaluation: Mapping[str, float], journal: Journal
    ) -> None:
        """Save and stop as `Saver.after_step` does. A rank that is to stop stops all. All ranks call it."""
        self._saver.made(step)
        if not self._saver.can_save:
            return
        # Signals reach ranks at different moments: without agreement some would save while others continue. A signal
        # that comes while they agree, or save, is handled after the save, or after the next step.
        stopping, due = self._saver.is_stopping, self._saver.is_due(step, is_stopping=False)
        facts = self._ranks.each((stopping, due), "agree on whether to save, and to stop")
        is_stopping = any(stopping for stopping, _ in facts)
        if not (is_stopping or facts[0][1]):  # the first rank's clock decides
            return
        path = self._ranks.led(lambda: self._saver.save_if_due(step, source, evaluation, journal, is_stopping))
        if path is not None and (is_stopping or any(self._ranks.each(self._saver.is_stopping, "agree on it again"))):
            self._saver.stop(path, journal)
