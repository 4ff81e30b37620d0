"""URLs for checkpoints, as they are written in a config."""

import pytest

from hotseat.config import loads
from hotseat.config.store_urls import is_store_url
from hotseat.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://key:hidden@bucket/x", r"the URL \(s3://\) contains a user or a password"),
        ("s3://hidden@bucket/x", "contains a user or a password"),
        ("s3://bucket/x?token=hidden", "take out what follows"),
        ("s3://bucket/x#hidden", "take out what follows"),
        ("memory://x", "what is there ends with the process"),
        ("https://example.org/x", "nothing can be written there"),
        ("simplecache::s3://bucket/x", "no URL of one folder"),
        ("s3://bucket/*", "no URL of one folder"),
        ("s3://bucket/a/../b", "no URL of one folder"),
        ("s3:/bucket/x", "names no folder"),
        ("s3://", "names no folder"),
        ("file:///", "names no folder"),
    ],
)
def test_what_is_no_place_for_checkpoints_is_refused_without_its_secrets(url, message):
    with pytest.raises(ConfigError, match=message) as caught:
        loads(f"checkpoint: {{every: 1, path: '{url}'}}")
    assert "checkpoint.path" in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_other_folders_have_to_be_here():
    with pytest.raises(ConfigError, match="run_dir: has to be a folder of this machine"):
        loads("run_dir: s3://bucket/x")
    with pytest.raises(ConfigError, match=r"checkpoint.export_path: has to be a folder of this machine"):
        loads("checkpoint: {export_path: 'gs://bucket/x'}")


def test_a_url_is_told_from_a_folder():
    assert all(is_store_url(url) for url in ("s3://b/x", "file:///x", "GS://b", "abfs://c@a/x", "s3:/b"))
    assert not any(is_store_url(path) for path in ("runs/x", "/runs/x", "./a:b", "a/b:/c", "~/x", "a:b"))
    section = loads("checkpoint: {every: 1, path: 's3://bucket/x'}").checkpoint
    assert (section.url, section.folder) == ("s3://bucket/x", None)
    section = loads("checkpoint: {every: 1, path: here}").checkpoint
    assert (section.url, section.folder) == (None, "here")
    assert loads("").checkpoint.url is None
