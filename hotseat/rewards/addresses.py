"""Addresses of reward servers: what is wrong with one, and whether somebody listens there. Standard library only."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from hotseat.errors import UserError

# Environment variables with bearer tokens: of reward servers, and of the endpoint of a run.
TOKEN, METRICS_TOKEN = "HOTSEAT_REWARD_TOKEN", "HOTSEAT_METRICS_TOKEN"


def bearer_token(environment: Mapping[str, str] | None = None, name: str = TOKEN) -> str | None:
    """Return the token that the environment holds in the variable `name`; None without one."""
    token = (os.environ if environment is None else environment).get(name, "")
    if not token:
        return None
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise UserError(f"{name}: a token is made of printable ASCII characters without spaces")
    return token


def connect_problems(urls: Sequence[str], timeout_s: float) -> dict[str, str]:
    """Connect to every server by TCP, all at once; return what went wrong, by URL."""
    with ThreadPoolExecutor(len(urls)) as pool:
        problems = pool.map(lambda url: _connect_problem(url, timeout_s), urls)
        return {url: problem for url, problem in zip(urls, problems, strict=True) if problem is not None}


def _connect_problem(url: str, timeout_s: float) -> str | None:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout_s).close()
    except TimeoutError:
        return f"no connection to port {port} of {parts.hostname} within {timeout_s:g} s"
    except socket.gaierror as error:
        return f"the name {parts.hostname} cannot be resolved ({error.strerror})"
    except OSError as error:
        return f"port {port} of {parts.hostname}: {error.strerror or error}"
    return None
