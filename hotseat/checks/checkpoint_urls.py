"""Checks that checkpoints can be uploaded to where they are to go, before a model loads."""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from hotseat.checks.stage import CheckContext, problem_of
from hotseat.errors import Problem, StoreError
from hotseat.processes import kept_driver

_TIMEOUT_S = 90.0  # for a first connection, and its repetitions by the storage's library


def place(context: CheckContext) -> Iterator[Problem]:
    """Find why nothing could be written to the URL of the checkpoints, by writing and reading there."""
    url = context.config.checkpoint.url
    # Of several ranks that a launcher started, one asks. A driver that is started again has asked before, and can go on
    # without an answer.
    if url is None or os.environ.get("RANK", "0") != "0" or kept_driver.restarts:
        return
    context.show(f"writing to {url}, to see that checkpoints can be uploaded")
    yield from problem_of("checkpoint.path", _why_unusable(url, context.config.run_dir))


def _why_unusable(url: str, run_dir: str) -> str | None:
    from hotseat.object_store import local_folder, why_unusable

    try:
        folder = local_folder(url)
    except StoreError as error:
        return str(error)
    if folder is not None and folder.resolve().is_relative_to(Path(run_dir).resolve()):
        return f"{url} is below run_dir, where checkpoints are before they are uploaded: give another disk, or no path"
    answer: Future[str | None] = Future()

    def ask() -> None:
        try:
            answer.set_result(why_unusable(url))
        except BaseException as error:
            answer.set_exception(error)

    # In a thread, because a storage's library may wait for longer than a user.
    threading.Thread(target=ask, daemon=True).start()
    try:
        return answer.result(_TIMEOUT_S)
    except concurrent.futures.TimeoutError:
        return f"{url} did not answer in {_TIMEOUT_S:.0f} s"
