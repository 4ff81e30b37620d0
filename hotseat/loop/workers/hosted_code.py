"""Care of the user's code in the process of a rollout host: keeps its output, and remembers what it dies of."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from hotseat.agents.crash_record import CrashRecord
from hotseat.agents.environments.worker_reports import note_exits
from hotseat.agents.episode_output import MAX_ECHO_CHARS, EpisodeLog, EpisodeOutput, captured, current_log
from hotseat.agents.user_lines import line_of
from hotseat.loop.workers.host_settings import HostSettings
from hotseat.loop.workers.notes import note_writer

_BROKEN = 71  # exit code of a process that an agent has made useless
_WARNED_BY = "hotseat.agents"  # the loggers whose warnings the user is to see


class HostedCode:
    """The user's code in the process of a rollout host, from the constructor of the host to its `close`."""

    def __init__(self, settings: HostSettings):
        self._settings = settings
        self._note = note_writer(settings.scorers.notes)
        self._crashes: CrashRecord | None = None
        self._output: EpisodeOutput | None = None
        self._stack = contextlib.ExitStack()
        if not settings.is_own_process and os._exit.__module__ != note_exits.__module__:
            note_exits(current_log.get, _say_end, line_of)  # once in a process, for all hosts in it
        if settings.logs is not None:
            has_console = not settings.is_own_process
            self._stack.enter_context(captured(has_console, self._say_where))
            self._stack.enter_context(_warnings_noted(_Noting(self._note)))

    def crashes(self, name: str) -> CrashRecord | None:
        """Return the record of what this host and those before it died of; None where a death ends the run too."""
        settings = self._settings
        if self._crashes is None and settings.crashes is not None:
            try:
                self._crashes = CrashRecord(Path(settings.crashes), name)
            except OSError as error:
                self._note(f"{settings.crashes}: {error.strerror}: an episode of which its host dies is played again")
                return None
            if settings.is_own_process:
                self._crashes.note_exits()
        return self._crashes

    def output(self, name: str) -> EpisodeOutput | None:
        """Return where the output of episodes is kept."""
        if self._output is None and self._settings.logs is not None:
            self._output = EpisodeOutput(Path(self._settings.logs) / name)
        return self._output

    def end_process(self) -> None:
        """End this process if it is the host's own: a new one takes its place."""
        if self._settings.is_own_process:
            with contextlib.suppress(Exception):
                sys.stderr.flush()
            os._exit(_BROKEN)

    def close(self) -> None:
        self._stack.close()
        if self._output is not None:
            self._output.close()
        if self._crashes is not None:
            self._crashes.close()

    def _say_where(self) -> None:
        file = None if self._output is None else self._output.file
        self._note(f"agents have printed {MAX_ECHO_CHARS >> 10} Ki characters; what follows is in {file} alone")


def _say_end(log: EpisodeLog, how: str) -> None:
    """Say which episode ends the run. Its prints go to its log, so this is written past them."""
    said = f"hotseat: sample {log.key} ends the run, in whose process agents are (cluster.runtime is local): {how}\n"
    os.write(2, said.encode())


class _Noting(logging.Handler):
    """Hands warnings to whoever shows them to the user."""

    def __init__(self, note: Callable[[str], None]):
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        self._note(self.format(record))


@contextlib.contextmanager
def _warnings_noted(handler: logging.Handler) -> Iterator[None]:
    logger = logging.getLogger(_WARNED_BY)
    if any(isinstance(each, _Noting) for each in logger.handlers):  # another host of this process has one
        yield
        return
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
