"""Ranks that a launcher started. There is no driver, so the first rank leads, and the others do what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from hotseat.cluster.group import name_of
from hotseat.config import Config
from hotseat.errors import HotseatError, RunError
from hotseat.loop.state.saving import Parts, Saver
from hotseat.observe import Journal

Result = TypeVar("Result")


class Worker(Protocol):
    """One rank. Its other methods can be called by the first rank on all of them."""

    def share(self, fact: Any, what: str) -> list[Any]:
        """Gather every rank's fact, in rank order. All ranks call it."""


W = TypeVar("W", bound=Worker)
P = ParamSpec("P")


class Ensemble(Generic[W]):
    """This rank among the others.

    `led` is entered by all ranks. Inside it the first works alone and `call`s the others where it needs them; they wait
    for its calls until it is done. What it raises they raise too, unless it was in a call: there each has an error of
    its own, or finds its connection to the one that failed closed.
    """

    def __init__(self, worker: W, rank: int):
        self._worker = worker
        self.is_first = rank == 0
        self._has_failed_together = False

    def led(self, do: Callable[[], Result]) -> Result:
        """What the first rank's `do` returns, on every rank; the others do not run theirs."""
        if not self.is_first:
            return self._follow()
        try:
            result = do()
        except BaseException as error:
            if not self._has_failed_together:
                self._say("error", _sent(error))
            raise
        self._say("result", result)
        return result

    def call(self, method: Callable[Concatenate[W, P], Result], *args: P.args, **kwargs: P.kwargs) -> list[Result]:
        """Call a method of the worker on all ranks, from the first, inside `led`; results in rank order."""
        name = name_of(method)
        self._say("call", (name, args, kwargs))
        return self._run(name, args, kwargs)

    def any(self, fact: bool, what: str) -> bool:
        """Together. Whether it is so on any rank."""
        return any(self._share(fact, what))

    def each(self, fact: Any, what: str) -> list[Any]:
        """Gather every rank's fact, in rank order. All ranks call it."""
        return self._share(fact, what)

    def _follow(self) -> Any:
        while True:
            kind, told = self._share(None, "hear from the first rank")[0]
            if kind == "error":
                raise told
            if kind == "result":
                return told
            self._run(*told)

    def _run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        with self._together():
            result = getattr(self._worker, method)(*args, **kwargs)
        return self._share(result, f"end {method!r}")

    def _say(self, kind: str, what: Any) -> None:
        self._share((kind, what), "tell the other ranks")

    def _share(self, fact: Any, what: str) -> list[Any]:
        with self._together():
            return self._worker.share(fact, what)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What fails here leaves the others somewhere else than where they would listen."""
        try:
            yield
        except BaseException:
            self._has_failed_together = True
            raise


def _sent(error: BaseException) -> BaseException:
    """An error that can travel, and is dealt with as it is where it was raised."""
    if isinstance(error, HotseatError | KeyboardInterrupt):
        return type(error)(*error.args)
    return RunError(f"the first rank failed: {type(error).__name__}: {error}")


class LedSaver:
    """A `Saver` among several ranks: the first one's writes, with the help of all."""

    def __init__(self, saver: Saver, ensemble: Ensemble[Any]):
        self._saver = saver
        self._ensemble = ensemble
        saver.has_begun = True

    def metrics(self) -> dict[str, float]:
        return self._saver.metrics()

    def keep(self, config: Config) -> None:
        """Keep a config as `Saver.keep` does; only the first rank writes."""
        if self._ensemble.is_first:
            self._saver.keep(config)

    def after_step(self, step: int, parts: Parts, evaluation: Mapping[str, float], journal: Journal) -> None:
        """Together. As `Saver.after_step`; a rank that is asked to stop stops all of them."""
        self._saver.made(step)
        if not self._saver.can_save:
            return
        # They are not told at the same moment: without agreement some would save, and others go on. One that is told
        # while they agree, or save, keeps it in mind.
        stopping, due = self._saver.is_stopping, self._saver.is_due(step, is_stopping=False)
        facts = self._ensemble.each((stopping, due), "agree on whether to save, and to stop")
        is_stopping = any(stopping for stopping, _ in facts)
        if not (is_stopping or facts[0][1]):  # the first rank's clock decides
            return
        path = self._ensemble.led(lambda: self._saver.save_if_due(step, parts, evaluation, journal, is_stopping))
        if path is not None and (is_stopping or self._ensemble.any(self._saver.is_stopping, "agree on it again")):
            self._saver.stop(path, journal)
