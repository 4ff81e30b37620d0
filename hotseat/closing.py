"""Objects that are closed at the end of a `with` block, and work that is undone where a block fails."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self


class Closing(ABC):
    """Has `close` called at the end of a `with` block."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def on_failure(clean_up: Callable[[], object]) -> Iterator[None]:
    """Call `clean_up` if the block raises anything, Ctrl-C included, which is raised on."""
    try:
        yield
    except BaseException:
        clean_up()
        raise
