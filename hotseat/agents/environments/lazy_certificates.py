"""TLS contexts that read certificates when a connection first needs them.

An OpenAI client makes such a context, and reads all certificates, which takes longer than an episode, though a gateway
on loopback has none. Loaded by `environment_worker.py` from its path: needs nothing but Python's own library.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from typing import Any


class LazyContext(ssl.SSLContext):
    """A context that calls `read` before its first connection, and before it says which certificates it has."""

    _read: Callable[[ssl.SSLContext], object] | None = None
    _lock: threading.Lock

    def _ready(self) -> None:
        with self._lock:
            read, self._read = self._read, None
            if read is not None:
                read(self)

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        self._ready()
        return super().wrap_socket(*args, **kwargs)

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        self._ready()
        return super().wrap_bio(*args, **kwargs)

    def get_ca_certs(self, *args: Any, **kwargs: Any) -> Any:
        self._ready()
        return super().get_ca_certs(*args, **kwargs)

    def cert_store_stats(self) -> Any:
        self._ready()
        return super().cert_store_stats()


def install() -> None:
    """Have `ssl.create_default_context` make such contexts for clients.

    The first context for some files is made as usual, which also finds out whether they can be read. The others have
    its settings, and read the same files.
    """
    make: Callable[..., ssl.SSLContext] = ssl.create_default_context
    made: dict[Any, ssl.SSLContext] = {}

    def create_default_context(
        purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH, *, cafile: Any = None, capath: Any = None, cadata: Any = None
    ) -> ssl.SSLContext:
        if purpose != ssl.Purpose.SERVER_AUTH or cadata:
            return make(purpose, cafile=cafile, capath=capath, cadata=cadata)
        first = made.get((cafile, capath))
        if first is None:
            first = made[cafile, capath] = make(purpose, cafile=cafile, capath=capath)
        context = LazyContext(ssl.PROTOCOL_TLS_CLIENT)
        context._lock = threading.Lock()
        for name in ("check_hostname", "verify_mode", "verify_flags", "options"):
            setattr(context, name, getattr(first, name))
        if first.keylog_filename is not None:
            context.keylog_filename = first.keylog_filename
        if cafile or capath:
            context._read = lambda late: late.load_verify_locations(cafile, capath)
        else:
            context._read = lambda late: late.load_default_certs(purpose)
        return context

    ssl.create_default_context = create_default_context
