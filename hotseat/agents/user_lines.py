"""Lines of the user's files: where an error was raised, and where a thread is."""

from __future__ import annotations

import os
import traceback
from types import FrameType

_NOT_THE_USERS = (os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(__file__)), "<frozen", "<string>")


def is_users(file: str) -> bool:
    """Tell whether a file is neither ours, nor Python's, nor an installed library's."""
    return not file.startswith(_NOT_THE_USERS) and "site-packages" not in file


def describe_error(error: BaseException) -> str:
    """Format an error with its place: the innermost line of the user's, else the innermost one."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = ([frame for frame in frames if is_users(frame.filename)] or frames)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"


def line_of(frame: FrameType | None) -> str | None:
    """Return FILE:LINE of the innermost frame of the user's, seen from an inner one; None if there is none."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None
