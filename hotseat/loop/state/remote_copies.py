"""Copies of a run's checkpoints at a URL: one is fetched to resume from, later ones are uploaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hotseat.errors import UserError
from hotseat.loop.state.checkpoints import CheckpointStore, shown_bytes
from hotseat.loop.state.remote_checkpoints import RemoteCheckpoints
from hotseat.loop.state.uploads import SHOW_EVERY_S, Say, Uploader

_MAX_STALL_S = 600.0  # wait for uploads at the end of a run, while not a byte moves
_MAX_STALL_AFTER_ERROR_S = 30.0  # the same for a run that failed: its error should not be delayed much


class RemoteCopies:
    """Checkpoints of a run at a URL, beside those of `store` on disk."""

    def __init__(self, remote: RemoteCheckpoints, store: CheckpointStore, clock: Callable[[], float] = time.monotonic):
        self._remote = remote
        self._store = store
        self._clock = clock
        self._uploads = Uploader(remote, store)

    @property
    def url(self) -> str:
        return self._remote.url

    def begin(self, is_resumed: bool, say: Callable[[str], object], show: Callable[[str], object]) -> None:
        """Download the newest checkpoint to resume from, if it is not on disk; bar other processes from uploading."""
        steps, here = self._remote.steps(), self._store.steps()
        if steps and not is_resumed:
            raise UserError(
                f"{self.url} holds checkpoints of another run: set checkpoint.resume=true to resume from them, or"
                " checkpoint.path to another place"
            )
        if steps and not (here and here[-1] >= steps[-1]):
            self._download(steps[-1], say, show)
        self._remote.take_over()
        if self._store.is_private:
            say(f"warning: the config has secrets, and is part of each checkpoint: who can read {self.url} has them")

    def _download(self, step: int, say: Callable[[str], object], show: Callable[[str], object]) -> None:
        shown_s = self._clock()

        def moved(num_bytes: int, total: int) -> None:
            nonlocal shown_s
            if self._clock() - shown_s >= SHOW_EVERY_S:
                shown_s = self._clock()
                show(f"downloading the checkpoint of step {step}: {shown_bytes(num_bytes)} of {shown_bytes(total)}")

        show(f"downloading the checkpoint of step {step} from {self.url}")
        started_s = self._clock()
        path = self._remote.download(step, self._store, moved)
        seconds = self._clock() - started_s
        say(f"downloaded {self.url}/{path.name}: {shown_bytes(self._store.size(step))} in {seconds:.1f} s")

    @contextmanager
    def uploading(
        self,
        say: Say,
        show: Callable[[str], object],
        newest: Callable[[], int | None],
        has_stopped: Callable[[], bool],
    ) -> Iterator[None]:
        """Upload checkpoints in the background inside the context, and await the last uploads at its end.

        After an error they are awaited for as long as bytes move; after an interrupt only if the run has stopped in
        order. newest: returns the step of the newest checkpoint on disk.
        """
        self._uploads.start(say)
        try:
            yield
            self._finish(say, show, newest, _MAX_STALL_S)
        except KeyboardInterrupt:
            if has_stopped():
                self._finish(say, show, newest, _MAX_STALL_S)
            raise
        except BaseException:
            self._finish(say, show, newest, _MAX_STALL_AFTER_ERROR_S)
            raise
        finally:
            self._uploads.close()

    def _finish(
        self, say: Say, show: Callable[[str], object], newest: Callable[[], int | None], stall_s: float
    ) -> None:
        uploaded = self._uploads.finish(stall_s, show)
        last = self._uploads.last_step
        if uploaded:
            if last is not None:
                say(f"checkpoint of step {last}: {self.url}")
            return
        step = newest()
        if step is not None and step != last:
            reason = self._uploads.error or "there was no answer"
            say(
                f"the checkpoint of step {step} is in {self._store.path(step)}, and not in {self.url}: {reason}; a"
                " resumed run uploads it",
                kind="warning",
            )

    def wake(self) -> None:
        """Take note that a checkpoint is complete on disk."""
        self._uploads.wake()

    def facts(self) -> Mapping[str, Any]:
        """Return facts about uploads, for `hotseat status`."""
        return self._uploads.facts()

    def metrics(self) -> Mapping[str, float]:
        return self._uploads.metrics()

    def delete_all(self, but_with: str, show: Callable[[str], object]) -> None:
        """Delete the copies, once nothing is uploaded any more, except those with a folder of this name."""
        self._uploads.finish(_MAX_STALL_S, show)
        self._uploads.close()
        self._remote.delete_all(but_with=but_with)
