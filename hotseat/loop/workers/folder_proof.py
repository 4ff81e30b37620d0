"""Proof that the ranks of a model and the process that commits their checkpoints see one folder.

A rank that writes to another disk of the same path would leave its part of every checkpoint there, and nobody would
notice before the run is resumed. So each rank writes a word that nobody else knows into the folder, before it loads its
model, and waits until the witness, a thread of the committing process, has written the same word beside it: then each
has seen what the other wrote.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hotseat.errors import RunError, UserError

_SEEN = ".seen"  # end of the names of the witness's answers
_LOOK_EVERY_S = 0.02
_APPEARS_S = 60.0  # in which a folder that the witness made appears on a network disk
_ANSWER_S = 120.0  # the witness may be busy, and a network disk late
_SHARE = (
    "put run_dir, or checkpoint.path, on a disk that all nodes share, or set checkpoint.every_minutes=0 to make none"
)


@dataclass(frozen=True)
class FolderProof:
    """Task of the ranks of a role: what they prove, and where.

    folder: in which checkpoints are made. name: of the folder below it for this proof. appears_s, answer_s: how long a
    rank waits for the witness's folder, and for its answer.
    """

    folder: str
    name: str
    role: str = "actor"
    appears_s: float = _APPEARS_S
    answer_s: float = _ANSWER_S

    def of(self, role: str) -> FolderProof:
        """Return the proof of another role in the same folder."""
        return replace(self, role=role)

    def give(self, rank: int) -> None:
        """Prove that this process sees the folder of the witness. Raises if it does not."""
        place, word = Path(self.folder) / self.name, secrets.token_hex(8)
        own, answer = place / f"{self.role}-{rank}", place / f"{self.role}-{rank}{_SEEN}"
        who = f"{self.role} rank {rank} on {socket.gethostname()}"
        if not _is_there(place.is_dir, self.appears_s):
            raise RunError(
                f"{who} does not see the folder {self.folder} in which this run makes its checkpoints, but another one,"
                f" or none: {_SHARE}"
            )

        def is_answered() -> bool:
            with contextlib.suppress(FileNotFoundError):
                if not own.exists() or own.read_text() != word:  # it may be of an earlier run, or removed with its rest
                    own.write_text(word)
                return answer.read_text() == word
            return False

        try:
            if _is_there(is_answered, self.answer_s):
                return
        except OSError as error:
            raise RunError(f"{who} cannot write to {self.folder}: {error.strerror}; {_SHARE}") from None
        raise RunError(
            f"{who} writes to a folder {self.folder} that is not the one in which this run makes its checkpoints:"
            f" {_SHARE}"
        )


@contextmanager
def witness(folder: Path, name: str | None = None) -> Iterator[FolderProof]:
    """Answer the ranks that prove that they see a folder, in a thread until the block ends.

    The thread looks for words in the folder, writes its answers, and ends with the block. name: of the folder for the
    proof, where ranks know it beforehand.
    """
    place = folder / (name or f".proof-{secrets.token_hex(8)}")
    has_ended = threading.Event()

    def answer() -> None:
        while not has_ended.wait(_LOOK_EVERY_S):
            with contextlib.suppress(OSError):  # a rank that gets no answer says so
                for path in place.iterdir():
                    seen = path.with_name(f"{path.name}{_SEEN}")
                    if path.suffix != _SEEN and not (seen.exists() and seen.read_text() == path.read_text()):
                        unfinished = place / f"unfinished{_SEEN}"
                        unfinished.write_text(path.read_text())
                        unfinished.replace(seen)

    try:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}; choose another place") from None
    thread = threading.Thread(target=answer, name="witness of the folder", daemon=True)
    thread.start()
    try:
        yield FolderProof(str(folder.absolute()), place.name)
    finally:
        has_ended.set()
        thread.join()
        shutil.rmtree(place, ignore_errors=True)


def _is_there(look: Callable[[], bool], patience_s: float) -> bool:
    until_s = time.monotonic() + patience_s
    while not look():
        if time.monotonic() > until_s:
            return False
        time.sleep(_LOOK_EVERY_S)
    return True
