"""What libraries say that concerns nobody."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager


@contextmanager
def unheard(logger_name: str, is_noise: Callable[[str], bool]) -> Iterator[None]:
    """Without those lines of a logger. It need not exist yet."""

    def is_heard(record: logging.LogRecord) -> bool:
        return not is_noise(record.getMessage())

    logger = logging.getLogger(logger_name)
    logger.addFilter(is_heard)
    try:
        yield
    finally:
        logger.removeFilter(is_heard)


def without_deepspeeds_greeting() -> AbstractContextManager[None]:
    """Around what saves a model: transformers imports DeepSpeed then, used or not, which tells that there is no GPU."""
    return unheard("DeepSpeed", lambda text: text.startswith("Setting accelerator to CPU"))
