"""The home of fsspec: what is missing or fails is said with its address, and without secrets."""

import sys

import pytest
from fsspec.registry import _registry

from hotseat.errors import StoreError
from hotseat.object_store import ObjectStore, why_unusable


def test_files_are_written_listed_and_deleted(tmp_path):
    store = ObjectStore(f"file://{tmp_path}/a b/c")
    assert store.sizes() == {}
    assert store.read("x") is None
    store.write("x", b"one")
    store.write("x", b"three")
    (tmp_path / "file").write_bytes(b"12")
    store.put(tmp_path / "file", "d/e")
    assert store.sizes() == {"x": 5, "d/e": 2}
    assert store.sizes("d") == {"d/e": 2}
    assert store.read("x") == b"three"
    store.delete(["x", "never"])
    store.delete_folder("d")
    assert store.sizes() == {}
    assert why_unusable(store.url) is None
    assert store.sizes() == {}


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    url = f"file://{tmp_path}/file/x"
    assert why_unusable(url).startswith(f"{url}/.trial-")
    with pytest.raises(StoreError, match="d/e: FileNotFoundError"):
        ObjectStore(f"file://{tmp_path}").get("d/e", tmp_path / "here")


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)  # where another test has loaded it
    assert why_unusable("s3://bucket/x") == "s3:// needs a package that is not installed: pip install 'hotseat[s3]'"
    assert "fsspec knows no protocol nothing://" in why_unusable("nothing://x")
