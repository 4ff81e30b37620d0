"""The end of a program that is a fork: Python's own, but for the libraries that all forks share.

To end, Python clears every module that is loaded. A fork gets a copy of nearly all memory that way, since each object
is written to, which takes longer than a short episode. So the modules of libraries are left as they are, and everything
else ends as usual: threads are joined, exit handlers run, modules of the user and what was imported since are cleared,
with the files and other objects that they have, and files that are left open are flushed. Loaded from its path by
`interpreter_process.py`: needs nothing but Python's own library.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import itertools
import os
import signal
import site
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

INTERRUPTED = -signal.SIGINT  # in the place of an exit code
_NOT_FLUSHED = 120  # Python's exit code where standard output cannot be written
_FILES: tuple[type[Any], ...] = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)  # the outer ones first


class ProgramEnd:
    """The end of forks. Made before any other exit handler, so that it is the last that Python calls.

    code: the exit code of this process, 0 to 255, which its script has decided on; or `INTERRUPTED`.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        # Handlers that are there already, such as those of a .pth file, would be called after this one.
        if atexit._ncallbacks() == 0:
            atexit.register(self._exit)

    def share(self) -> None:
        """Take the modules that are loaded for those that all forks share."""
        self._last = next(reversed(sys.modules))
        self._own = _own_modules()
        self._files = [each for each in gc.get_objects() if type(each) in _FILES]

    def _exit(self) -> None:
        """End this process, unless something is left that needs Python's own end, or has to be reported by it."""
        if self.code is None:
            return
        if not _is_flushed() or len(sys._current_frames()) > 1:
            if self.code == INTERRUPTED:
                _interrupt()
            return
        for name in ("stdin", "stdout", "stderr"):
            setattr(sys, name, getattr(sys, f"__{name}__", None))
        self._clear_modules()
        self._flush_files()
        ctypes.CDLL(None).fflush(None)
        code = self.code if _is_flushed() else _NOT_FLUSHED
        if code == INTERRUPTED:
            _interrupt()
        os._exit(code)

    def _clear_modules(self) -> None:
        """Have the objects of the user's modules end, with those of what was imported since."""
        new = ["__main__", *itertools.takewhile(lambda name: name != self._last, reversed(sys.modules))]
        alone = {id(namespace) for namespace in _namespaces(new)}
        shared = _namespaces(self._own)
        for name in (*new, *self._own):
            sys.modules[name] = None  # type: ignore[assignment]
        gc.collect()  # which ends most objects, while their modules still have everything
        still_used = [each for each in gc.get_objects() if id(each) in alone and type(each) is dict]
        for namespace in (*still_used, *shared):
            if "__loader__" in namespace:
                _clear(namespace)
        gc.collect()

    def _flush_files(self) -> None:
        """Flush files that libraries keep, or that the program gave to them."""
        files = [*self._files, *(each for each in gc.get_objects() if type(each) in _FILES)]
        for kind in _FILES:
            for file in files:
                if type(file) is kind:
                    with contextlib.suppress(Exception):  # as where Python closes a file that nobody has closed
                        file.flush()


def _interrupt() -> None:
    """End this process as an interrupt does that nobody handles."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _own_modules() -> list[str]:
    """Return the names of loaded modules that are neither built in, nor of Python's own library, nor installed."""
    folders = [os.path.dirname(os.__file__), *site.getsitepackages(), site.getusersitepackages()]
    of_libraries = tuple(os.path.join(folder, "") for folder in folders)
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    return [name for name, file in files.items() if file and name != "__main__" and not file.startswith(of_libraries)]


def _namespaces(names: Iterable[str]) -> list[dict[str, Any]]:
    modules = (sys.modules.get(name) for name in names)
    return [vars(module) for module in modules if isinstance(module, types.ModuleType)]


def _is_flushed() -> bool:
    """Write what is left of the output, and return whether that was possible."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except Exception:
        return False
    return True


def _clear(namespace: dict[str, Any]) -> None:
    """Remove what a module has: first what may use the rest at its end."""
    for kinds in ((types.ModuleType, types.FunctionType, type), ()):
        for name in list(namespace):
            if name != "__builtins__" and not isinstance(namespace.get(name), kinds):
                namespace[name] = None
