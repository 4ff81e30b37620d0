"""The contract of everything that scores groups: a reward function in processes of its own, or reward servers."""

from __future__ import annotations

import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from hotseat.closing import Closing
from hotseat.failed import Failed
from hotseat.rewards.answers import Score
from hotseat.rewards.function_worker import packed

T = TypeVar("T")


@dataclass(frozen=True)
class NamedArguments:
    """Values for reward functions that are called by names. The samples of a group share the columns of their row."""

    columns: Mapping[str, Any]  # "prompt" is the input
    completions: Sequence[str]  # without special tokens
    completion_ids: Sequence[Sequence[int]]

    @property
    def message(self) -> dict[str, Any]:
        """The arguments as JSON, of which `function_worker.named_arguments` makes those of a function."""
        columns = {name: packed(value) for name, value in self.columns.items()}
        return {"columns": columns, "completions": [*self.completions], "completion_ids": [*self.completion_ids]}


@dataclass(frozen=True)
class SampleGroup:
    """Samples of one prompt to score. ids: name them in messages."""

    queries: list[str]  # prompts with answers
    prompts: list[str]
    labels: list[Any]
    ids: list[str]
    named: NamedArguments | None  # for functions that are called by names


class Scorer(Closing):
    """Scores groups beside other work. Every future ends, with a score or the reason of a failure per sample.

    `close` ends the work: unfinished futures raise an error. A second call does nothing.
    """

    def submit(
        self,
        queries: Sequence[str],
        prompts: Sequence[str],
        labels: Sequence[Any],
        ids: Sequence[Any],
        named: NamedArguments | None = None,
    ) -> Future[list[Score | Failed]]:
        """Score one group; `ids` name the samples in messages. named: for functions that are called by names."""
        sizes = {len(queries), len(prompts), len(labels), len(ids)}
        assert len(sizes) == 1, f"{len(queries)} queries, {len(prompts)} prompts, {len(labels)} labels, {len(ids)} ids"
        return self.score(SampleGroup(list(queries), list(prompts), list(labels), [str(each) for each in ids], named))

    @abstractmethod
    def score(self, group: SampleGroup) -> Future[list[Score | Failed]]:
        """Score one group."""


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def named_samples(ids: Sequence[str], max_shown: int = 8) -> str:
    """Return the samples of a group for a message: `samples 0/17/0, 0/17/1 and 6 more`."""
    shown = ", ".join(ids[:max_shown])
    more = f" and {len(ids) - max_shown} more" if len(ids) > max_shown else ""
    return f"{'sample' if len(ids) == 1 else 'samples'} {shown}{more}"


def when_all_are_done(futures: Sequence[Future[Any]], make: Callable[[], T]) -> Future[T]:
    """Return a future of what `make` returns or raises. The thread that completes the last of the futures calls it."""
    made: Future[T] = Future()
    left = len(futures) + 1
    lock = threading.Lock()

    def count(_: object = None) -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = left == 0
        if is_last:
            try:
                made.set_result(make())
            except BaseException as error:
                made.set_exception(error)

    for future in futures:
        future.add_done_callback(count)
    count()
    return made
