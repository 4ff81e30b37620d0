"""The contract of everything that scores groups: a reward function in processes of its own, or reward servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from hotseat.failed import Failed
from hotseat.rewards.answers import Score


@dataclass(frozen=True)
class NamedArguments:
    """Values for reward functions that are called by names. The samples of a group share the columns of their row."""

    columns: Mapping[str, Any]  # "prompt" is the input
    completions: Sequence[str]  # without special tokens
    completion_ids: Sequence[Sequence[int]]


class Scorer(Protocol):
    """Scores groups beside other work. Every future ends, with a score or the reason of a failure per sample."""

    def submit(
        self,
        queries: Sequence[str],
        prompts: Sequence[str],
        labels: Sequence[Any],
        ids: Sequence[Any],
        named: NamedArguments | None = None,
    ) -> Future[list[Score | Failed]]:
        """Score one group; `ids` name the samples in messages. named: for functions that are called by names."""

    def close(self) -> None:
        """End the work. Unfinished futures raise an error. A second call does nothing."""


def named_samples(ids: Sequence[str], max_shown: int = 8) -> str:
    """Return the samples of a group for a message: `samples 0/17/0, 0/17/1 and 6 more`."""
    shown = ", ".join(ids[:max_shown])
    more = f" and {len(ids) - max_shown} more" if len(ids) > max_shown else ""
    return f"{'sample' if len(ids) == 1 else 'samples'} {shown}{more}"


def when_all_are_done(futures: Sequence[Future[Any]], finish: Callable[[], None]) -> None:
    """Call `finish` once, by the thread that completes the last of the futures; at once if there are none."""
    if not futures:
        finish()
        return
    left = len(futures)
    lock = threading.Lock()

    def count(_: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = left == 0
        if is_last:
            finish()

    for future in futures:
        future.add_done_callback(count)
