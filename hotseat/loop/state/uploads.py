"""Uploads the checkpoints of a run to a URL in the background, while the run continues."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from hotseat.errors import StoreError, TakenOverError
from hotseat.loop.state.checkpoints import CheckpointStore
from hotseat.loop.state.remote_checkpoints import RemoteCheckpoints

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_SAY_AGAIN_S = 600.0  # between two warnings that uploads fail
SHOW_EVERY_S = 15.0  # between two lines about how far a transfer is


class Say(Protocol):
    def __call__(self, text: str, kind: Literal["note", "warning"] = "note") -> object: ...


class Uploader:
    """Uploads the newest checkpoint and the best one, in a thread; then deletes old ones at the URL.

    One that becomes complete during an upload waits for its end. If by then there is a newer one, it is skipped. What
    fails is tried again, after pauses that grow to a minute, for as long as the run lasts: errors hold nothing up.
    A checkpoint that is being uploaded stays on disk until that is done.
    """

    def __init__(
        self,
        remote: RemoteCheckpoints,
        local: CheckpointStore,
        *,
        first_pause_s: float = _FIRST_PAUSE_S,
        longest_pause_s: float = _LONGEST_PAUSE_S,
    ):
        self._remote = remote
        self._local = local
        self._first_pause_s, self._longest_pause_s = first_pause_s, longest_pause_s
        self._say: Say = lambda text, kind="note": None
        self._changed = threading.Condition()
        self._is_asked = False  # a checkpoint was completed
        self._is_ended = False
        self._there: set[int] = set()  # steps that are complete at the URL, or were
        self._has_listed = self._is_pruned = False
        self._thread: threading.Thread | None = None
        # What is known of the uploads. The thread changes it; any thread reads it, unlocked.
        self.step: int | None = None  # that is being uploaded
        self.sent, self.total = 0, 0  # its bytes
        self.last_step: int | None = None  # the newest that is complete at the URL
        self.error: str | None = None  # of the last attempt; None: it went well
        self.num_failures = 0
        self.is_lost = False  # another process has taken over
        self.moved_s = time.monotonic()  # when bytes were last sent

    # --- for the run ----------------------------------------------------------------------------------------------

    def start(self, say: Say) -> None:
        """Begin, with what is on disk already."""
        self._say = say
        self._remote.warn = lambda text: say(text, kind="warning")
        if self._thread is None:
            self._is_asked = True
            self._thread = threading.Thread(target=self._run, name="uploads of checkpoints", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Take note that a checkpoint is complete on disk."""
        with self._changed:
            self._is_asked = True
            self._changed.notify_all()

    def is_done(self) -> bool:
        """Tell whether nothing is left to be uploaded, or nothing will be."""
        with self._changed:
            return self._thread is None or self._is_ended or not (self._is_asked or self.step is not None)

    def finish(self, stall_s: float, show: Callable[[str], object]) -> bool:
        """Wait for the end of uploads, as long as bytes move; return whether all is there. Show how far they are."""
        began_s = shown_s = time.monotonic()
        is_shown = False
        while not self.is_done():
            now = time.monotonic()
            if now - max(began_s, self.moved_s) > stall_s:
                break
            if not is_shown or now - shown_s >= SHOW_EVERY_S:
                show(f"uploading {self.describe()}")
                is_shown, shown_s = True, now
            with self._changed:
                self._changed.wait(0.2)
        return self.is_done() and self.error is None and not self.is_lost

    def close(self) -> None:
        """Begin no further upload."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def describe(self) -> str:
        """Describe the upload that is under way, for people."""
        if self.step is None:
            return f"a checkpoint to {self._remote.url}"
        share = f" ({self.sent / self.total:.0%} of {self.total / 2**20:,.1f} MiB)" if self.total else ""
        return f"the checkpoint of step {self.step}{share} to {self._remote.url}"

    def facts(self) -> dict[str, Any]:
        """Return what `hotseat status` shows."""
        return {
            "url": self._remote.url,
            "last_step": self.last_step,
            "step": self.step,
            "sent": self.sent,
            "bytes": self.total,
            "error": self.error,
        }

    def metrics(self) -> Mapping[str, float]:
        """Return figures for the metrics of a step."""
        waiting = 0 if self.step is None else max(0, self.total - self.sent)
        figures = {"upload/waiting_gib": waiting / 2**30, "upload/failures": float(self.num_failures)}
        return figures if self.last_step is None else {"upload/step": float(self.last_step), **figures}

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s, said_s = self._first_pause_s, -_SAY_AGAIN_S
        while self._wait_for_work():
            try:
                self._upload_all()
            except (StoreError, OSError) as error:
                self.num_failures += 1
                self.error = str(error)
                if time.monotonic() - said_s >= _SAY_AGAIN_S:
                    said_s = time.monotonic()
                    self._say(f"an upload failed, and is tried again: {error}", kind="warning")
                with self._changed:
                    self._is_asked = True
                    self._changed.wait_for(lambda: self._is_ended, pause_s)
                pause_s = min(self._longest_pause_s, 2 * pause_s)
            except TakenOverError as error:
                self._give_up(str(error))
            except Exception as error:  # whatever it is, somebody has to hear of it, and the run goes on
                self._give_up(f"nothing more is uploaded: {type(error).__name__}: {error}")
            else:
                if self.error is not None:
                    self._say(f"uploads work again: {self._remote.url} has the checkpoint of step {self.last_step}")
                self.error, pause_s, said_s = None, self._first_pause_s, -_SAY_AGAIN_S

    def _give_up(self, why: str) -> None:
        self.error, self.is_lost = why, True
        self._say(why, kind="warning")
        self.close()

    def _wait_for_work(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_asked or self._is_ended)
            return not self._is_ended

    def _upload_all(self) -> None:
        """Upload until everything that is wanted is there."""
        if not self._has_listed:
            steps = self._remote.steps()
            self._there.update(steps)
            self.last_step = max(steps, default=None)
            self._has_listed = True
        while not self._is_ended:
            with self._changed:
                if self._is_pruned:
                    self._is_asked = False
                step = self.step = self._hold_next()
                if step is None and self._is_pruned:
                    self._changed.notify_all()
                    return
            if step is not None:
                self._upload(step)
            self._remote.prune()
            self._is_pruned = True

    def _upload(self, step: int) -> None:
        try:
            self.sent, self.total = 0, self._local.size(step)
            self._remote.upload(step, self._local.path(step), self._moved)
        finally:
            self._local.held.discard(step)
        self._is_pruned = False
        self._there.add(step)
        self.last_step = max(step, self.last_step or 0)
        self.moved_s = time.monotonic()

    def _hold_next(self) -> int | None:
        """Return the newest step that is wanted and not there, and have the disk keep it; None if there is none."""
        with self._local.lock:
            waiting = [step for step in self._local.wanted() if step not in self._there]
            if not waiting:
                return None
            self._local.held.add(waiting[-1])
            return waiting[-1]

    def _moved(self, num_bytes: int) -> None:
        self.sent += num_bytes
        self.moved_s = time.monotonic()
