"""Vision-language models: prepared pixels as arguments of their forward, and the positions of their tokens.

An image is prepared once for the whole run, before a model loads (`hotseat.data.images`): resized and normalised by the
image processor of the model, and written to a file whose name is a digest of image and processor. From then on it is
known by the path of that file: prompts, requests, segments and micro-batches hold paths, and each process that runs a
model maps the file. In the token ids an image is a run of placeholders, which the model's forward replaces by what its
visual encoder makes of the pixels; log-probs, caches and packing treat them as other tokens.

Frames of simulators are made during the run. They are prepared in memory (`hotseat.data.frames`), and instead of a path
they are known by a name that has the pixels with it, wherever it goes (`PackedImage`).

A policy may sample a placeholder. It then ends the answer (`placeholder_ids`): as the last token of a segment it is
never an input, so no forward looks for its pixels.

What is in transformers 5.17 and 5.19, found out with tiny random models on a CPU:

- Image processors come in two kinds, for torchvision and for Pillow, whose pixels differ in rounding. Pillow's are
  used everywhere, so that a run's numbers do not depend on whether torchvision is installed.
- The processors of Qwen2.5-VL, Qwen3-VL and SmolVLM ask for a processor of videos, which needs torchvision; SmolVLM's
  also for num2words. `processor_class` leaves the part for videos out.
- Qwen's models give images positions in three dimensions (M-RoPE), by their `get_rope_index`, which is called here for
  each segment by itself, so that packed and padded segments have the same ones. Idefics3, SmolVLM and LLaVA count.
- Attention of visual encoders is not causal: `set_attention` gives ours to the language model alone. Qwen's encoders
  attend window by window, in as many calls as there are windows, unless the name of their attention has "flash" in it:
  then it gets the ends of all windows (`train.attention.image_attention`).
- torchvision from PyPI is built for CUDA and fails beside a CPU build of torch (`operator torchvision::nms does not
  exist`), which is why `make setup` removes it. vLLM's files of models import it; `rollout.vllm_images` does without.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import json
import math
import pickle
import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load, save
from torch import Tensor

from hotseat.errors import RunError, UnsupportedError

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_TEMPLATE_FILES = ("chat_template.json", "chat_template.jinja")  # tokenizers read and write the second one, too
TOKENS = "token_ids"  # in the metadata of a prepared image
_CACHED = 256  # images whose pixels a process keeps mapped
_PIXELS = "pixel_values"  # as models call them
_PACKED = "pixels:"
_PROBE = 4096  # bytes by which to tell whether compression pays
_WORTH_IT = 32 << 10  # bytes from which on it may
_PALETTE = "palette"  # the tensor with the values of packed bytes
_ENCODERS = ("visual", "vision_tower", "vision_model")  # what families call the visual encoder
_LANGUAGE = ("language_model", "text_model")


def sees_images(config: Any) -> bool:
    """Tell whether models of this config see images, and transformers has no class that loads them for text alone."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = type(config)
    return kind in AutoModelForImageTextToText._model_mapping and kind not in AutoModelForCausalLM._model_mapping


def policy_class(config: Any) -> Any:
    """Return the class of transformers that loads a policy of this config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if sees_images(config) else AutoModelForCausalLM


def value_class(config: Any) -> Any:
    """Return the class of transformers that loads a value model of this config: a body, and a head of one number.

    Most vision-language families have no such class: one is registered for them, of transformers' head and their body.
    """
    from transformers import AutoModelForSequenceClassification

    kind = type(config)
    if sees_images(config) and kind not in AutoModelForSequenceClassification._model_mapping:
        # Not by `register`, which in transformers 5.17 leaves out classes for transformers' own configs.
        AutoModelForSequenceClassification._model_mapping._extra_content[kind] = _with_score_head(kind)
    return AutoModelForSequenceClassification


def _with_score_head(kind: Any) -> Any:
    """Make the class of a value model: names of its weights in files are those of the family's policy."""
    from transformers import AutoModel, AutoModelForImageTextToText
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.modeling_layers import GenericForSequenceClassification

    body, policy = AutoModel._model_mapping[kind], AutoModelForImageTextToText._model_mapping[kind]
    family = next(each for each in body.__mro__ if each.__name__.endswith("PreTrainedModel"))
    name = f"{kind.__name__.removesuffix('Config')}ForSequenceClassification"
    renamed = get_checkpoint_conversion_mapping(policy.__name__)
    if renamed is not None:
        register_checkpoint_conversion_mapping(name, renamed, overwrite=True)
    # Names of weights are not converted for classes of other modules.
    return type(name, (GenericForSequenceClassification, family), {"__module__": body.__module__})


def placeholder_ids(config: Any) -> tuple[int, ...]:
    """Return the tokens that stand for pixels, of images and of videos, in a model of this config."""
    names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    return tuple(sorted({getattr(config, name) for name in names if getattr(config, name, None) is not None}))


def encoder_of(model: Any) -> Any:
    """Return the visual encoder of a vision-language model."""
    return _part(model, _ENCODERS)


def set_attention(model: Any, name: str) -> None:
    """Set the attention of the language model. A visual encoder's is not causal, and stays as it is."""
    language_part(model).set_attn_implementation(name)


def language_part(model: Any) -> Any:
    """Return the part of a model that reads embeddings of tokens: all of it, unless it sees images."""
    return _part(model, _LANGUAGE) if sees_images(model.config) else model


def _part(model: Any, names: Sequence[str]) -> Any:
    for name in names:
        if hasattr(model.base_model, name):
            return getattr(model.base_model, name)
    raise UnsupportedError(
        f"{type(model).__name__} has no part called {' or '.join(names)}: choose Qwen2.5-VL, Qwen3-VL, SmolVLM or LLaVA"
    )


class PackedImage(str):
    """Prepared pixels in memory, under a name in the place where other images have the path of their file.

    The name is made of a digest, so that equal images are equal. Pickled, the pixels are a buffer of their own, which
    Ray puts into the node's shared memory as it is, from where the receiving process copies it: between processes of a
    node they are written once and read once, and no third process touches them.
    """

    stored: bytes  # tensors in the format of safetensors
    is_compressed: bool

    def __new__(cls, name: str, stored: bytes, is_compressed: bool) -> PackedImage:
        image = super().__new__(cls, name)
        image.stored, image.is_compressed = stored, is_compressed
        return image

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        stored = pickle.PickleBuffer(self.stored) if int(protocol) >= 5 else self.stored
        return _unpickled, (str(self), stored, self.is_compressed)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors as they were stored."""
        return dict(load(zlib.decompress(self.stored) if self.is_compressed else self.stored))


def _unpickled(name: str, stored: Any, is_compressed: bool) -> PackedImage:
    # A copy: the buffer is in memory of all that came with it, and would keep that in use.
    return PackedImage(name, bytes(stored), is_compressed)


def pack_pixels(pixels: Mapping[str, Tensor], palette: Tensor | None = None, digest: str | None = None) -> PackedImage:
    """Return prepared pixels as an image that needs no file.

    palette: [channels or 1, 256] float32, the values of bytes; `pixel_values` [1, channels, H, W] are bytes then, which
    take a tenth of the time. digest: differs wherever the result does; None: it is computed.
    """
    stored = _stored(pixels, palette)
    return _packed(stored, digest or hashlib.blake2b(stored, digest_size=20).hexdigest())


def head_of_bytes(shape: Sequence[int], palette: Tensor) -> bytes:
    """Return what stands before the bytes of images of this shape, [1, channels, H, W], where they are packed.

    It is the same for all of them, and takes longer to make than all else of a small image.
    """
    codes = torch.arange(math.prod(shape), dtype=torch.int64).to(torch.uint8).reshape(*shape)
    stored, last = _stored({_PIXELS: codes}, palette), codes.numpy().tobytes()
    assert stored.endswith(last), "safetensors writes bytes after wider numbers"
    return stored[: -len(last)]


def pack_bytes(head: bytes, codes: np.ndarray, digest: str) -> PackedImage:
    """Return bytes, [channels, H, W] uint8, as `pack_pixels` would with a palette, given the head of their shape."""
    return _packed(head + codes.tobytes(), digest)


def _stored(pixels: Mapping[str, Tensor], palette: Tensor | None) -> bytes:
    tensors = dict(pixels) if palette is None else {**pixels, _PALETTE: palette}
    return save({name: tensor.contiguous() for name, tensor in tensors.items()})


def _packed(stored: bytes, digest: str) -> PackedImage:
    # Drawn pictures become small. Those of cameras, and small ones, take longer to compress than a policy to act.
    middle = stored[len(stored) // 2 :][:_PROBE]
    is_small = len(stored) >= _WORTH_IT and len(zlib.compress(middle, 1)) < len(middle) // 4
    return PackedImage(f"{_PACKED}{digest}", zlib.compress(stored, 1) if is_small else stored, is_small)


def image_as_json(image: str) -> str | list[Any]:
    """Return an image for a file of JSON: the path of its file, or its name and its pixels in base64."""
    if not isinstance(image, PackedImage):
        return image
    return [str(image), base64.b64encode(image.stored).decode(), image.is_compressed]


def image_from_json(image: str | list[Any]) -> str:
    """Return the image that `image_as_json` described."""
    if isinstance(image, str):
        return image
    name, stored, is_compressed = image
    return PackedImage(name, base64.b64decode(stored), is_compressed)


def is_packed(image: str) -> bool:
    """Tell whether an image is its pixels, not the path of a file."""
    return image.startswith(_PACKED)


def pixels_of(image: str) -> dict[str, Tensor]:
    """Return the prepared pixels of an image, by the names of the forward's arguments."""
    tensors = dict(tensors_of(image))
    palette = tensors.pop(_PALETTE, None)
    if palette is not None:
        tensors[_PIXELS] = _values(tensors[_PIXELS], palette)
    return tensors


@functools.lru_cache(maxsize=_CACHED)
def tensors_of(image: str) -> dict[str, Tensor]:
    """Return the tensors of an image as they are stored: unpacked, or mapped."""
    if isinstance(image, PackedImage):
        return image.tensors()
    try:
        with safe_open(image, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise RunError(
            f"{image}: a prepared image cannot be read ({error}): the folder of prepared images must be on a file"
            " system that all machines of the run share"
        ) from None


def _values(codes: Tensor, palette: Tensor) -> Tensor:
    """Look bytes up, [num, channels, H, W] uint8, in a palette of each channel or one of all."""
    channels = torch.arange(codes.shape[1], device=codes.device)[:, None, None] % palette.shape[0]
    return palette[channels, codes.long()]


def tokens_of(image: str) -> tuple[int, ...]:
    """Read the tokens that stand for a prepared image in a prompt."""
    with safe_open(image, "pt") as file:
        return tuple(json.loads(file.metadata()[TOKENS]))


@dataclass(frozen=True)
class PreparedImage:
    """A prepared image, and the tokens that stand for it."""

    path: str  # or a `PackedImage`
    token_ids: tuple[int, ...]

    @classmethod
    @functools.lru_cache(maxsize=1024)  # an episode asks in each turn; what is in a file never changes
    def of_file(cls, path: str) -> PreparedImage:
        """Read which tokens stand for an image that was prepared before."""
        return cls(path, tokens_of(path))


def expand_images(
    token_ids: Sequence[int], image_token_id: int, images: Sequence[PreparedImage]
) -> tuple[list[int], list[int]]:
    """Replace the token of each image, of which there are as many, by those that stand for it.

    Returns the tokens, and for each of the old ones, and their end, where it begins now.
    """
    expanded: list[int] = []
    begins: list[int] = []
    left = iter(images)
    for token_id in token_ids:
        begins.append(len(expanded))
        expanded += next(left).token_ids if token_id == image_token_id else (token_id,)
    return expanded, [*begins, len(expanded)]


def copy_processor(model: str, folder: Path) -> None:
    """Copy the files of a model's processor to the folder of one that was trained from it.

    A chat template that is there already, by the tokenizer of the run, stays.
    """
    from transformers.utils import cached_file

    for name in (*_PROCESSOR_FILES, *_TEMPLATE_FILES):
        cached = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
        if cached is not None and not (name in _TEMPLATE_FILES and (folder / name).exists()):
            shutil.copyfile(cached, folder / name)


class Vision:
    """Inputs that the forward of a vision-language model takes besides tokens."""

    def __init__(self, model: Any):
        self._base = model.base_model
        self.image_token_id = int(getattr(model.config, "image_token_id", None) or model.config.image_token_index)
        self._positions_to_last = functools.lru_cache(maxsize=_CACHED)(self._compute_positions)
        self.has_axes = hasattr(self._base, "get_rope_index")  # positions in three dimensions
        # Patches that become one token, along an edge; only models with such positions are asked.
        self._merge_size = int(getattr(model.config.vision_config, "spatial_merge_size", 1))

    @classmethod
    def of(cls, model: Any) -> Vision | None:
        """Return the vision of a model, or None if it sees nothing."""
        return cls(model) if sees_images(model.config) else None

    def arguments(self, images: Sequence[str], device: torch.device | None) -> dict[str, Tensor]:
        """Join the pixels of images, in the order of their placeholders."""
        each = [tensors_of(image) for image in images]
        if not each:
            return {}
        palette = each[0].get(_PALETTE)
        if palette is not None and all(_PALETTE in one and torch.equal(one[_PALETTE], palette) for one in each):
            codes = torch.cat([one[_PIXELS] for one in each]).to(device)  # a quarter of the bytes of their values
            return {_PIXELS: _values(codes, palette.to(device))}
        each = [pixels_of(image) for image in images]
        # Images in tiles are [1, num_tiles, channels, height, width]; the model drops the first dimension.
        dim = 1 if each[0][_PIXELS].ndim == 5 else 0
        return {name: torch.cat([pixels[name] for pixels in each], dim=dim).to(device) for name in each[0]}

    def features(self, images: Sequence[str], device: torch.device | None) -> Tensor:
        """Compute what stands for the placeholders of images, in order: [num_placeholders, hidden_size]."""
        output: Any = self._base.get_image_features(**self.arguments(images, device))
        return torch.cat([*output.pooler_output])

    def common_shape(self, images: Sequence[str]) -> tuple[int, ...] | None:
        """Return what the images of sequences must have in common for these to share a forward; None: they never do.

        With positions in three dimensions it is the grid of each image, in order: pixels are rows of patches, whose
        number decides how products are computed. Otherwise all images have one shape. Tiles of images share nothing.
        """
        tensors = [tensors_of(image) for image in images]
        if self.has_axes:
            return tuple(int(size) for each in tensors for size in each["image_grid_thw"].flatten())
        shapes = {tuple(each[_PIXELS].shape) for each in tensors}
        return None if len(shapes) != 1 or len(next(iter(shapes))) != 4 else next(iter(shapes))

    def positions(self, token_ids: Tensor, images: Sequence[str]) -> Tensor:
        """Compute positions in three dimensions: [num_tokens] int64 -> [3, num_tokens], both on the CPU."""
        if not images:
            return torch.arange(len(token_ids)).expand(3, -1)
        end = int((token_ids == self.image_token_id).nonzero().max()) + 1
        head = self._positions_to_last(tuple(token_ids[:end].tolist()), tuple(images))
        # After the last image there is text alone, which counts on from the largest position.
        rest = int(head.max()) + 1 + torch.arange(len(token_ids) - end)
        return torch.cat([head, rest.expand(3, -1)], dim=1)

    def _compute_positions(self, token_ids: tuple[int, ...], images: tuple[str, ...]) -> Tensor:
        """Compute positions up to the last image.

        `get_rope_index` gets each image by itself, with the text before it: it takes images that touch for one.
        """
        tokens = torch.tensor(token_ids)
        is_image = (tokens == self.image_token_id).to(torch.int32)
        grids = [pixels_of(image)["image_grid_thw"] for image in images]  # [1, 3] each
        counts = [int(grid.prod()) // self._merge_size**2 for grid in grids]
        places = is_image.nonzero()[:, 0]
        assert sum(counts) == len(places), f"{len(places)} placeholders for images of {sum(counts)}"
        parts: list[Tensor] = []
        begin = next_position = 0
        for grid, last in zip(grids, itertools.accumulate(counts), strict=True):
            end = int(places[last - 1]) + 1
            positions, _ = self._base.get_rope_index(
                tokens[None, begin:end], is_image[None, begin:end], image_grid_thw=grid
            )
            parts.append(positions[:, 0] + next_position)
            begin, next_position = end, int(parts[-1].max()) + 1
        return torch.cat(parts, dim=1)
