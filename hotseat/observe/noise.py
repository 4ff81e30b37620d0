"""Suppression of library messages that are of no use to anybody."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager


@contextmanager
def without_log_lines(logger_name: str, is_noise: Callable[[str], bool]) -> Iterator[None]:
    """Drop the lines of a logger for which `is_noise` is true. The logger need not exist yet."""

    def is_heard(record: logging.LogRecord) -> bool:
        return not is_noise(record.getMessage())

    logger = logging.getLogger(logger_name)
    logger.addFilter(is_heard)
    try:
        yield
    finally:
        logger.removeFilter(is_heard)


def without_deepspeeds_greeting() -> AbstractContextManager[None]:
    """Drop DeepSpeed's note that there is no GPU: transformers imports it to save a model, used or not."""
    return without_log_lines("DeepSpeed", lambda text: text.startswith("Setting accelerator to CPU"))
