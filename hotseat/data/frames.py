"""Frames of simulators: prepared for the policy while it acts, and kept in memory.

Unlike the images of rows, frames are many, small, and not known before the run. A prepared frame is a name that has its
pixels with it (`hotseat.vision.PackedImage`), and takes the place of a file's path in requests, segments and
micro-batches. It disappears with the last of them: no folder has to be shared between machines, and none has to be
emptied.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotseat.data.images import OF_TOKENS
from hotseat.errors import UserError
from hotseat.vision import PackedImage, head_of_bytes, pack_bytes, pack_pixels, pixels_of

FILM = "data:image/webp;base64,"
_PIXELS = "pixel_values"
_FRAME_MS = 300  # of a film
_FILM_EDGE = 192  # pixels of a film's longer edge at most, where it is of pictures for people
_KEPT_BYTES = 256 << 20  # of prepared frames: worlds look alike again and again


@dataclass(frozen=True)
class Frame:
    """A prepared frame."""

    image: PackedImage
    token_ids: tuple[int, ...]  # that stand for it in a context


@dataclass(frozen=True)
class _Layout:
    """Layout that a processor gives to frames of one shape."""

    token_ids: tuple[int, ...]
    names: frozenset[str]  # of the tensors that the model takes
    palette: Tensor | None  # values of bytes, where nothing else matters
    digest: str  # of shape and palette
    head: bytes  # what stands before the bytes of a packed frame, where there is a palette


class FramePreparer:
    """Prepares frames with the processor of a model.

    Most processors do the same to every byte of a frame that has the model's size: they are asked once what, since
    asking them takes longer than a small policy takes to act.
    """

    def __init__(self, processor: Any):
        self._processor = processor
        self._kept: OrderedDict[tuple[tuple[int, ...], bytes], Frame] = OrderedDict()  # by shape and digest
        self._num_bytes = 0
        self._layouts: dict[tuple[int, ...], _Layout] = {}  # by shape of a frame

    def prepare(self, frame: np.ndarray) -> Frame:
        """Return a frame of [H, W, 3] uint8, prepared."""
        if frame.ndim != 3 or frame.shape[2] != 3 or frame.dtype != np.uint8:
            raise UserError(f"an image of a simulator is {frame.dtype} {frame.shape}: it must be uint8 [H, W, 3]")
        frame = np.ascontiguousarray(frame)
        key = (frame.shape, hashlib.blake2b(frame.data, digest_size=20).digest())
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        layout = self._layouts.get(frame.shape) or self._layout(frame)
        if layout.palette is not None:
            # Without this, `tobytes` would take ten times as long.
            planes = np.ascontiguousarray(frame.transpose(2, 0, 1))
            packed = pack_bytes(layout.head, planes, f"{key[1].hex()}{layout.digest}")
        else:
            packed = pack_pixels(self._pixels(frame, layout.names))
        prepared = Frame(packed, layout.token_ids)
        self._kept[key] = prepared
        self._num_bytes += len(prepared.image.stored)
        while self._num_bytes > _KEPT_BYTES:
            self._num_bytes -= len(self._kept.popitem(last=False)[1].image.stored)
        return prepared

    def _layout(self, frame: np.ndarray) -> _Layout:
        """Find out what the processor makes of frames of this shape."""
        text = self._processor.image_token
        try:
            made = self._processor(text=[text], images=[_image(frame)], return_tensors="pt", add_special_tokens=False)
        except (ValueError, ZeroDivisionError) as error:
            raise UserError(f"an image of {frame.shape}: the model's processor does not take it: {error}") from None
        names = frozenset(name for name, value in made.items() if name not in OF_TOKENS and isinstance(value, Tensor))
        palette = self._palette(frame.shape, names)
        # With a palette, frames and these two are all that packed bytes depend on.
        hashed = hashlib.blake2b(repr(frame.shape).encode(), digest_size=8)
        hashed.update(b"" if palette is None else palette.numpy().tobytes())
        head = b"" if palette is None else head_of_bytes((1, 3, *frame.shape[:2]), palette)
        layout = _Layout(tuple(made["input_ids"][0].tolist()), names, palette, hashed.hexdigest(), head)
        self._layouts[frame.shape] = layout
        return layout

    def _pixels(self, frame: np.ndarray, names: Collection[str]) -> dict[str, Tensor]:
        made = self._processor.image_processor(images=[_image(frame)], return_tensors="pt")
        return {name: made[name] for name in names}

    def _palette(self, shape: tuple[int, ...], names: Collection[str]) -> Tensor | None:
        """Return the values of bytes, [3 or 1, 256], of a processor that treats each byte by itself; else None.

        It is read off a frame with every byte, and tried on another one.
        """
        num_pixels = shape[0] * shape[1]
        if names != {_PIXELS} or num_pixels < 256:
            return None
        probe = np.arange(num_pixels).astype(np.uint8).reshape(*shape[:2], 1).repeat(3, axis=2)
        values = self._pixels(probe, names)[_PIXELS]
        if values.shape != (1, 3, *shape[:2]) or values.dtype != torch.float32:
            return None
        palette = values[0].reshape(3, num_pixels)[:, :256].contiguous()
        palette = palette[:1].clone() if bool((palette == palette[:1]).all()) else palette
        trial = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
        packed = pack_pixels({_PIXELS: torch.from_numpy(trial.transpose(2, 0, 1)[None].copy())}, palette)
        is_alike = torch.equal(pixels_of(packed)[_PIXELS], self._pixels(trial, names)[_PIXELS])
        return palette if is_alike else None


def _image(frame: np.ndarray) -> Any:
    import PIL.Image  # only here: most runs have no images, and do not need the package

    return PIL.Image.fromarray(np.ascontiguousarray(frame))


def film_of_pictures(pictures: Sequence[np.ndarray]) -> str:
    """Return pictures of [H, W, 3] uint8, in order, as a small animated image in a data URI."""
    frames = []
    for picture in pictures:
        frame = _image(picture)
        frame.thumbnail((_FILM_EDGE, _FILM_EDGE))
        frames.append(frame)
    return _film(frames, quality=60)


def film_of(images: Sequence[str]) -> str | None:
    """Return prepared frames, in order, as an animated image in a data URI; None if shapes differ, or they are patches.

    Their colours are stretched over the film: what the processor did to pixels differs by model.
    """
    frames = [pixels_of(image)["pixel_values"] for image in images]
    if not frames or any(frame.ndim != 4 or frame.shape != frames[0].shape for frame in frames):
        return None
    pixels = torch.cat(frames).float()  # [num_frames, 3, H, W]
    low, high = pixels.min(), pixels.max()
    scaled = ((pixels - low) / (high - low).clamp(min=1e-6) * 255).round().to(torch.uint8)
    return _film([_image(picture.permute(1, 2, 0).numpy()) for picture in scaled], lossless=True)


def _film(pictures: Sequence[Any], **quality: Any) -> str:
    file = io.BytesIO()
    pictures[0].save(file, "WEBP", save_all=True, append_images=pictures[1:], duration=_FRAME_MS, loop=0, **quality)
    return FILM + base64.b64encode(file.getvalue()).decode("ascii")
