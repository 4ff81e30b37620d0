"""Checks that models and data sets can be fetched from the hub, before a library tries for a minute."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hotseat.checks.named_files import hub_data_sets, models_of, near
from hotseat.checks.stage import CheckContext
from hotseat.errors import Problem

ENDPOINT = "https://huggingface.co"
OFFLINE = "HF_HUB_OFFLINE"
_CONNECT_TIMEOUT_S = 4.0
_ON = ("1", "ON", "YES", "TRUE")
# Environment variables that prevent fetching, by what would be fetched.
_SWITCHES = {
    "models": (OFFLINE, "TRANSFORMERS_OFFLINE"),
    "data": (OFFLINE, "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"),
}
_UNREACHABLE = "this machine is offline"


def models_and_data(context: CheckContext) -> Iterator[Problem]:
    """Find a model or a data set that is neither here, nor cached on this machine, nor can be fetched from the hub.

    If the hub cannot be reached and everything is cached, this process and those that it starts work offline.
    """
    models = [(key, name) for key, name in models_of(context.config) if not Path(name).is_dir()]
    data_sets = list(hub_data_sets(context.config))
    why_models = _why_not_fetched(_SWITCHES["models"]) if models else None
    why_data = _why_not_fetched(_SWITCHES["data"]) if data_sets else None
    for key, name in models if why_models else ():
        if not is_cached(name, os.environ):
            cache = f"the cache of the hub ({cache_folder(os.environ)})"
            hint = f"Give the folder of a checkpoint on this machine{near(Path(name), 'config.json')}"
            text = f"there is no such folder here, and it is not in {cache}; {why_models}. {hint}"
            yield Problem("", f"{key} {name!r}: {text}")
            return
    for key, name in data_sets if why_data else ():
        if not is_data_set_cached(name, os.environ):
            caches = f"the caches of the hub ({cache_folder(os.environ)}, {data_set_cache(os.environ)})"
            hint = f"Give a file or a folder on this machine{'' if '/' in name else near(Path(name))}"
            text = f"there is no such file or folder here, and it is not in {caches}; {why_data}. {hint}"
            yield Problem("", f"{key} {name!r}: {text}")
            return
    if any(why is not None and why.startswith(_UNREACHABLE) for why in (why_models, why_data)):
        _stay_offline()


def _why_not_fetched(switches: Sequence[str]) -> str | None:
    """Return why nothing is fetched from the hub: a variable is set, or the hub cannot be reached. None: it is."""
    for name in switches:
        if os.environ.get(name, "").upper() in _ON:
            return f"{name} is set, so it is not fetched"
    endpoint = os.environ.get("HF_ENDPOINT") or ENDPOINT
    if is_reachable(endpoint, _CONNECT_TIMEOUT_S):
        return None
    return f"{_UNREACHABLE}: {urllib.parse.urlsplit(endpoint).hostname} cannot be reached"


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


def is_data_set_cached(name: str, env: Mapping[str, str]) -> bool:
    """Tell whether the caches of the hub hold something of a data set."""
    if any((cache_folder(env) / f"datasets--{name.replace('/', '--')}" / "snapshots").glob("*")):
        return True
    folder = data_set_cache(env)  # its names are in snake case, so only letters and digits are compared
    entries = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return _letters(name) in {_letters(entry) for entry in entries}


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def data_set_cache(env: Mapping[str, str]) -> Path:
    """Return where `datasets` keeps the data sets that it has prepared."""
    if env.get("HF_DATASETS_CACHE"):
        return Path(env["HF_DATASETS_CACHE"]).expanduser()
    return _home(env) / "datasets"


def cache_folder(env: Mapping[str, str]) -> Path:
    """Return where the hub's libraries keep what they fetched."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if env.get(name):
            return Path(env[name]).expanduser()
    return _home(env) / "hub"


def _home(env: Mapping[str, str]) -> Path:
    home = env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser()


def _stay_offline() -> None:
    os.environ[OFFLINE] = "1"
    constants = sys.modules.get("huggingface_hub.constants")
    if constants is not None:  # imported before, when the variable was not set
        constants.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
