"""TLS contexts that read certificates when a connection first needs them.

An OpenAI client makes such a context, and reads all certificates, which takes longer than an episode, though a gateway
on loopback has none. Loaded from its path by `environment_worker.py` and `interpreter_process.py`: needs nothing but
Python's own library.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from typing import Any

READERS = ("load_verify_locations", "set_default_verify_paths")
USERS = ("_wrap_socket", "_wrap_bio", "get_ca_certs", "cert_store_stats")  # by which a context needs what was read


def install() -> None:
    """Have each context read certificates before its first connection, and before it says which it has.

    The first context that reads some files does so at once, which also finds out whether they can be read.
    """
    usual: dict[str, Callable[..., Any]] = {name: getattr(ssl.SSLContext, name) for name in (*READERS, *USERS)}
    lock, were_read = threading.Lock(), set()

    def load_verify_locations(self: Any, cafile: Any = None, capath: Any = None, cadata: Any = None) -> None:
        files = (cafile, capath)
        if cadata is None and files in were_read:
            _later(self, usual["load_verify_locations"], files)
            return
        usual["load_verify_locations"](self, cafile, capath, cadata)
        if cadata is None:
            were_read.add(files)

    def set_default_verify_paths(self: Any) -> None:
        _later(self, usual["set_default_verify_paths"], ())

    def after_reading(use: Callable[..., Any]) -> Callable[..., Any]:
        def read_and_use(self: Any, *args: Any, **kwargs: Any) -> Any:
            with lock:
                for read, files in vars(self).pop("unread", ()):
                    read(self, *files)
            return use(self, *args, **kwargs)

        return read_and_use

    replaced = {"load_verify_locations": load_verify_locations, "set_default_verify_paths": set_default_verify_paths}
    for name, function in (replaced | {name: after_reading(usual[name]) for name in USERS}).items():
        setattr(ssl.SSLContext, name, function)


def _later(context: Any, read: Callable[..., Any], files: tuple[Any, ...]) -> None:
    vars(context).setdefault("unread", []).append((read, files))
