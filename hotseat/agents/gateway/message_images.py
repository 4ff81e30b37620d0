"""Images in the messages of clients, in the forms of all three protocols.

    {"type": "image_url", "image_url": {"url": URL}}                                            chat completions
    {"type": "input_image", "image_url": URL}                                                   responses
    {"type": "image", "source": {"type": "base64", "media_type": ..., "data": ...}}             messages
    {"type": "image", "source": {"type": "url", "url": URL}}

A URL is `data:image/...;base64,...`, or `hotseat:image/N` for image N of the prompt, which is prepared already. Files
and addresses on other machines are refused: whoever is outside would otherwise decide what this process reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hotseat.agents.gateway.fields import BadRequest
from hotseat.vision import PreparedImage

_TYPES = ("image_url", "input_image", "image")
_PROMPT = "hotseat:image/"
_SHOWN = 60  # characters of a URL in an error


def content_of(text: str, image_token: str, num_images: int) -> str | list[dict[str, Any]]:
    """Return a prompt as the content of a message: its text or, with images, parts of text and of images."""
    if not num_images:
        return text
    parts: list[dict[str, Any]] = []
    for at, piece in enumerate(text.split(image_token)):
        parts += [{"type": "image_url", "image_url": {"url": f"{_PROMPT}{at - 1}"}}] if at else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def urls_of(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the URLs of the images in messages, in order. Raises `BadRequest` for those that are refused."""
    return [
        _url(part, f"messages[{at}]", str(message.get("role")))
        for at, message in enumerate(messages)
        for part in _listed(message)
        if _is_image(part)
    ]


def with_images(messages: Sequence[Mapping[str, Any]], images: Sequence[PreparedImage]) -> list[Mapping[str, Any]]:
    """Return messages with the prepared images in the places of the clients' own."""
    left = iter(images)
    return [
        {
            **message,
            "content": [
                {"type": "image", "prepared": next(left)} if _is_image(part) else part for part in _listed(message)
            ],
        }
        if any(map(_is_image, _listed(message)))
        else message
        for message in messages
    ]


def number_of_prompt(url: str, num_images: int) -> int | None:
    """Return which image of the prompt a URL names; None if it contains an image."""
    if not url.startswith(_PROMPT):
        return None
    number = url.removeprefix(_PROMPT)
    if not (number.isdecimal() and len(number) < 9 and int(number) < num_images):
        raise BadRequest(f"{url[:_SHOWN]!r}: the prompt has {num_images} images, counted from 0", "messages")
    return int(number)


def _listed(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _TYPES


def _url(part: Mapping[str, Any], where: str, role: str) -> str:
    if role == "assistant":
        raise BadRequest(f"{where}: an image in an answer of the policy, which writes text alone", where)
    kind = part["type"]
    if kind == "image":
        source = part.get("source")
        source = source if isinstance(source, Mapping) else {}
        if source.get("type") == "base64":
            return f"data:{source.get('media_type')};base64,{source.get('data')}"
        url = source.get("url")
    else:
        inside = part.get("image_url")
        url = inside.get("url") if isinstance(inside, Mapping) else inside
    if not isinstance(url, str):
        raise BadRequest(f"{where}: a part of type {kind} without the URL or the base64 of an image", where)
    if not url.startswith(("data:", _PROMPT)):
        raise BadRequest(
            f"{where}: {url[:_SHOWN]!r}: files and addresses of images are refused: send data:image/png;base64,...",
            where,
        )
    return url


def details_of(messages: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the sizes in which clients want images to be seen, other than the model's own."""
    parts = [part for message in messages for part in _listed(message) if _is_image(part)]
    asked = [part.get("image_url") if isinstance(part.get("image_url"), Mapping) else part for part in parts]
    return {str(each["detail"]) for each in asked if each is not None and each.get("detail") not in (None, "auto")}
