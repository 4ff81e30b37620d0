"""Models on the hub: whether they can be had, before a library spends a minute on trying."""

from __future__ import annotations

import os
import socket
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ENDPOINT = "https://huggingface.co"
OFFLINE = "HF_HUB_OFFLINE"
_CONNECT_TIMEOUT_S = 4.0
_ON = ("1", "ON", "YES", "TRUE")


@dataclass(frozen=True)
class HubProblem:
    """A model that cannot be had, and why."""

    model: str
    text: str


def hub_problem(models: Sequence[str], timeout_s: float = _CONNECT_TIMEOUT_S) -> HubProblem | None:
    """Find a hub name that is neither on this machine nor can be fetched.

    If the hub cannot be reached and everything is here already, this process and those that it starts use what is here.
    """
    if not models:
        return None
    absent = [model for model in models if not is_cached(model, os.environ)]
    if any(os.environ.get(name, "").upper() in _ON for name in (OFFLINE, "TRANSFORMERS_OFFLINE")):
        why = f"{OFFLINE} is set, so it is not fetched"
    else:
        endpoint = os.environ.get("HF_ENDPOINT") or ENDPOINT
        if is_reachable(endpoint, timeout_s):
            return None
        why = f"this machine is offline: {urllib.parse.urlsplit(endpoint).hostname} cannot be reached"
    if absent:
        return HubProblem(
            absent[0],
            f"there is no such folder here, and it is not in the cache of the hub ({cache_folder(os.environ)}); {why}."
            " Give the folder of a checkpoint on this machine",
        )
    _stay_offline()
    return None


def is_reachable(endpoint: str, timeout_s: float) -> bool:
    """Tell whether the server of an address, or the proxy that leads there, takes connections."""
    address = urllib.parse.urlsplit(endpoint)
    host = address.hostname or ""
    proxy = None if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get(address.scheme)
    if proxy is not None:
        address = urllib.parse.urlsplit(proxy if "//" in proxy else f"//{proxy}")
    port = address.port or (80 if address.scheme == "http" else 443)
    reached = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((address.hostname or host, port), timeout=timeout_s).close()
        except OSError:
            return
        reached.set()

    # In a thread, because the time that a name server takes is not part of the socket's timeout.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return reached.is_set()


def is_cached(model: str, env: Mapping[str, str]) -> bool:
    """Tell whether the cache of the hub holds a model's config.json."""
    folder = cache_folder(env) / f"models--{model.replace('/', '--')}" / "snapshots"
    return any(folder.glob("*/config.json"))


def cache_folder(env: Mapping[str, str]) -> Path:
    """Return where the hub's libraries keep what they fetched."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if env.get(name):
            return Path(env[name]).expanduser()
    home = env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


def _stay_offline() -> None:
    os.environ[OFFLINE] = "1"
    constants = sys.modules.get("huggingface_hub.constants")
    if constants is not None:  # imported before, when the variable was not set
        constants.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
