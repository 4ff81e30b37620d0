"""Checks of addresses, as written: of reward servers, and of our own."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from hotseat.words import without_url_secrets


def as_list(value: str | Sequence[str] | None) -> list[str]:
    """Return the addresses that the value of `reward.url` holds."""
    return [value] if isinstance(value, str) else list(value or ())


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach what listens at an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url_problems(
    value: str | Sequence[str] | None,
    *,
    what: str = "a reward server",
    example: str = "http://127.0.0.1:5000/get_reward",
    token: str = "HOTSEAT_REWARD_TOKEN",
) -> Iterator[str]:
    """Yield what is wrong with the value of `reward.url`, or of another option that holds addresses.

    token: the environment variable for the bearer token.
    """
    if value is None:
        return
    urls = as_list(value)
    if not urls:
        yield f"an empty list: give the address of {what}, such as {example}"
    for url in urls:
        if (problem := _problem(url, what, example, token)) is not None:
            yield problem
    for url in dict.fromkeys(url for url in urls if urls.count(url) > 1):
        yield f"{_shown(url)!r} is given twice"


def _shown(url: str) -> str:
    """Return what was given as an address without its secrets, be it an address or not."""
    user, at, rest = url.rpartition("@")
    scheme, mark, _ = user.rpartition("://")
    return without_url_secrets(f"{scheme.split('://')[0]}{mark}***@{rest}" if at else url)


def _problem(url: str, what: str, address: str, token: str) -> str | None:
    shown, example = repr(_shown(url)), f"write it as {address}"
    if url.endswith(".py"):
        return f"{shown} is a file: set reward.function to it"
    if "," in url:
        return f"{shown}: several addresses are a list, [http://a:5000/get_reward, http://b:5000/get_reward]"
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port)
    except ValueError as error:
        reason = "" if "@" in url else f" ({error})"  # which quotes parts of the address
        return f"{shown} is no address{reason}: {example}"
    if not is_address or url != url.strip() or " " in url:
        return f"{shown} is no address of {what}: {example}"
    if parts.username is not None or parts.password is not None:
        # It would be in the saved config and in messages. The address is not shown for the same reason.
        return (
            f"the address of {parts.hostname} contains a user or a password: take it out, and put a token into the"
            f" environment variable {token}"
        )
    return None
