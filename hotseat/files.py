"""Files of a run: never opened through links, and replaced as a whole."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path
from typing import IO, Any

from hotseat.errors import UserError


def opened(path: Path, mode: str = "r", buffering: int = -1) -> IO[Any]:
    """Open a file as `open` does, in UTF-8 if it is text. Raises if the file is a link: it could lead anywhere."""
    return open(path, mode, buffering, encoding=None if "b" in mode else "utf-8", opener=_not_through_links)


def _not_through_links(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK) and os.path.islink(path):
            raise link_error(Path(path)) from None
        raise


def link_error(path: Path) -> UserError:
    """Return the error for a link where a run keeps a file or a folder of its own."""
    return UserError(
        f"{path} is a link to {os.readlink(path)}: a run writes to no link in its folder; remove the link, or choose"
        " another name for the run"
    )


def write_whole(path: Path, content: str | bytes, *, is_private: bool = False) -> None:
    """Write a file so that readers, and a crash at any moment, find the old content or the new one.

    is_private: only this user may read it.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with open(os.open(unfinished, flags, 0o600 if is_private else 0o666), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Have the system put a file, or the names in a folder, on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Have the system put everything below a folder on disk, and the folder itself."""
    for path in [*folder.rglob("*"), folder]:
        if not path.is_symlink():
            sync(path)
