"""Checks of URLs of storages, such as `s3://bucket/folder`, as written."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*:/")
_EXAMPLE = "write it as s3://BUCKET/FOLDER"
# Why checkpoints at such a URL would be of no use.
_USELESS = {"memory": "what is there ends with the process"} | dict.fromkeys(
    ("http", "https", "data", "zip", "tar", "git", "github"), "nothing can be written there"
)


def is_store_url(path: str) -> bool:
    """Tell whether a path is a URL, and no folder of this machine."""
    return _URL.match(path) is not None


def store_url_problem(url: str) -> str | None:
    """Return what is wrong with a URL for checkpoints; None if nothing is. A URL with secrets is not shown."""
    try:
        parts = urlsplit(url)
        has_secrets = parts.username is not None or parts.password is not None
    except ValueError:
        return f"no URL: {_EXAMPLE}"
    if has_secrets or ("@" in url and not parts.netloc):
        return (
            f"the URL ({parts.scheme}://) contains a user or a password: take them out, and put them where the library"
            " of the storage looks for them, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment"
        )
    if parts.query or parts.fragment or "?" in url or "#" in url:
        return f"{parts.scheme}://{parts.netloc}{parts.path}: take out what follows `?` or `#`; {_EXAMPLE}"
    if "::" in url or any(letter in url for letter in "*[]{}") or url != url.strip() or "/../" in f"{url}/":
        return f"{url!r} is no URL of one folder: {_EXAMPLE}"
    if parts.scheme in _USELESS:
        return f"{url}: {_USELESS[parts.scheme]}; {_EXAMPLE}"
    if "://" not in url or not (parts.netloc or parts.path.strip("/")):
        return f"{url!r} names no folder: {_EXAMPLE}"
    return None
