"""Shows what vLLM does while it starts, by the messages that it logs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# The beginning of a message, and what vLLM does from then on. A message that a version lacks changes nothing.
STAGES = {
    "Starting to load model": "loading weights",
    "Model loading took": "compiling",
    "Available KV cache memory": "making the KV cache",
    "GPU KV cache size": "capturing CUDA graphs",
    "Graph capturing finished": "finishing its start",
}

_shows: list[Callable[[str], object]] = []  # the innermost last


@contextmanager
def stages_shown(show: Callable[[str], object]) -> Iterator[None]:
    """Call `show` with what vLLM does in this process, whenever it begins something else, while the context lasts."""
    _shows.append(show)
    try:
        yield
    finally:
        _shows.remove(show)


class StageHandler(logging.Handler):
    """Shows a stage when a message says that it begins. vLLM makes it from its logging settings (see `log_to`)."""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        stage = next((stage for beginning, stage in STAGES.items() if message.startswith(beginning)), None)
        if stage is not None and _shows:
            _shows[-1](stage)
