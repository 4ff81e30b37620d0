"""Files at an address that fsspec knows, such as `s3://bucket/folder`. This is the only file that imports fsspec.

Libraries of storage read their credentials from the environment or from files of their own; none are in an address.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hotseat.errors import StoreError
from hotseat.files import sync_tree
from hotseat.words import without_url_secrets

# Extras of this package by the protocols that they are for.
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_FILES = ("file", "local")
# Where a reader finds an object whole or not at all, whatever becomes of its writer. Elsewhere files are renamed.
_WHOLE = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci")
# A server that does not answer is an error that is seen and tried again, not a wait for minutes.
_S3 = {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 2}}}
_FOLDERS = {"auto_mkdir": True}
_OPTIONS: dict[str, dict[str, Any]] = {"s3": _S3, "s3a": _S3, "file": _FOLDERS, "local": _FOLDERS}


class ObjectStore:
    """A folder in such a storage. Every method raises `StoreError` if the storage, or the way to it, fails.

    Nothing is cached, so that a reader sees what another process wrote. Names are relative to the folder.
    """

    def __init__(self, url: str):
        """Make no connection yet. Raises `StoreError` if the package of the protocol is not installed."""
        self.url = url.rstrip("/")
        self.protocol = urlsplit(url).scheme
        self._fs = _file_system(self.protocol)
        with _explained(self.url):
            self._root = str(self._fs._strip_protocol(self.url)).rstrip("/")

    @property
    def local_path(self) -> Path | None:
        """Return the folder, if it is one of this machine."""
        return Path(self._root) if self.protocol in _FILES else None

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the names of all files below a folder, with their bytes."""
        with _explained(self.url), suppress(FileNotFoundError):
            root = self._at(folder)
            files = self._fs.find(root, detail=True)
            start = len(self._root) + 1
            return {str(name)[start:]: int(facts["size"] or 0) for name, facts in files.items()}
        return {}

    def put(self, file: Path, name: str, moved: Callable[[int], object] = lambda num_bytes: None) -> None:
        """Upload a file. moved: called with each number of bytes that were sent, if the library says so."""
        with _explained(f"{self.url}/{name}"):
            self._fs.put_file(str(file), self._at(name), callback=_callback(moved))

    def get(self, name: str, file: Path, moved: Callable[[int], object] = lambda num_bytes: None) -> None:
        """Download a file."""
        with _explained(f"{self.url}/{name}"):
            self._fs.get_file(self._at(name), str(file), callback=_callback(moved))

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if there is none."""
        with _explained(f"{self.url}/{name}"), suppress(FileNotFoundError):
            return bytes(self._fs.cat_file(self._at(name)))
        return None

    def write(self, name: str, content: bytes) -> None:
        """Write a small file: whoever reads it, and whatever happens meanwhile, finds it whole or not at all."""
        with _explained(f"{self.url}/{name}"):
            if self.protocol in _WHOLE:
                self._fs.pipe_file(self._at(name), content)
                return
            unfinished = self._at(f"{name}.{secrets.token_hex(4)}.part")
            if self.protocol in _FILES:
                self._fs.makedirs(self._fs._parent(unfinished), exist_ok=True)
            self._fs.pipe_file(unfinished, content)
            self._fs.mv(unfinished, self._at(name))

    def sync(self, folder: str) -> None:
        """Have a file system of this machine put everything below a folder on disk; others do that by themselves."""
        if self.protocol in _FILES:
            with _explained(f"{self.url}/{folder}"):
                sync_tree(Path(self._at(folder)))

    def delete(self, names: Iterable[str]) -> None:
        """Delete files, as far as they are there, one after another in this order."""
        for name in names:
            with _explained(f"{self.url}/{name}"), suppress(FileNotFoundError):
                self._fs.rm_file(self._at(name))

    def delete_folder(self, folder: str) -> None:
        """Remove what a file system keeps of a folder without files; elsewhere there is nothing to remove."""
        if self.protocol not in _WHOLE:
            with _explained(f"{self.url}/{folder}"), suppress(FileNotFoundError):
                self._fs.rm(self._at(folder), recursive=True)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def local_folder(url: str) -> Path | None:
    """Return the folder that a URL names, if it is one of this machine."""
    return ObjectStore(url).local_path


def why_unusable(url: str) -> str | None:
    """Return why nothing can be written to a folder and read from it; None if that was done."""
    name, content = f".trial-{secrets.token_hex(8)}", secrets.token_bytes(16)
    try:
        store = ObjectStore(url)
        store.write(name, content)
        read, listed = store.read(name), store.sizes()
        store.delete([name])
    except StoreError as error:
        return str(error)
    if read != content or listed.get(name) != len(content):
        return f"{url}: what is written there is not what is read"
    return None


def _file_system(protocol: str) -> Any:
    try:
        import fsspec
    except ImportError:
        raise StoreError(f"{protocol}:// needs the package fsspec: pip install fsspec") from None
    try:
        made = fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise StoreError(f"fsspec knows no protocol {protocol}://: there are s3, gs, abfs, file and others") from None
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        how = f"pip install 'hotseat[{extra}]'" if extra else without_url_secrets(str(error))
        raise StoreError(f"{protocol}:// needs a package that is not installed: {how}") from None
    with _explained(f"{protocol}://"):
        return made(**_OPTIONS.get(protocol, {}), skip_instance_cache=True, use_listings_cache=False)


def _callback(moved: Callable[[int], object]) -> Any:
    from fsspec.callbacks import Callback

    class Progress(Callback):
        def relative_update(self, inc: int = 1) -> None:
            moved(inc)

    return Progress()


@contextmanager
def _explained(address: str) -> Iterator[None]:
    """Raise `StoreError` for every error of a library, naming the address."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:  # of the library of a protocol, its transports, or files
        text = next(iter(str(error).strip().splitlines()), "") or "no reason was given"
        raise StoreError(without_url_secrets(f"{address}: {type(error).__name__}: {text}")) from error
