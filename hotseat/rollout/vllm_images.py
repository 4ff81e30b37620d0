"""Prepared images for vLLM, in the form that its scheduler and its model runner take.

vLLM is given the token ids that the trainer learns from, with the placeholders of every image, and the pixels that the
run prepared (`hotseat.vision`): nothing is expanded, resized or normalised a second time. No processor of transformers
is made, which would need torchvision; vLLM's own processor of a model only describes its fields.

An image is known to vLLM by the name of its file, a digest of the image and of how it was prepared. Cached prefixes and
cached outputs of the visual encoder carry that name, so two images never share an entry.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hotseat.errors import UserError
from hotseat.rollout.kinds import ImageOptions
from hotseat.vision import pixels_of, tokens_of

_KEY = "hotseat_images"  # among vLLM's arguments for processors, which reach all of its processes
_MODALITY = "image"
_TORCHVISION = "torchvision"
_CACHED = 64  # images that are kept as vLLM takes them: the samples of a prompt have the same


def engine_arguments(options: ImageOptions | None, known: frozenset[str]) -> dict[str, Any]:
    """Return vLLM's arguments for images. known: the arguments that this version has."""
    if options is None:
        return {}
    arguments: dict[str, Any] = {
        "limit_mm_per_prompt": {_MODALITY: options.max_images, "video": 0},
        "mm_processor_kwargs": {_KEY: options.largest},
        "mm_processor_cache_gb": 0,  # pixels are mapped from their files
        "mm_device_do_normalize": False,  # the run's pixels are normalised
    }
    return {name: value for name, value in arguments.items() if name in known}


def use_prepared_images() -> None:
    """Have vLLM describe images by the run's prepared ones, in this process, instead of by ones that it makes up.

    vLLM asks the processor of a model how many tokens an image has at most, and for images to measure its memory with.
    Both need a processor of transformers. A model that was started without `ImageOptions` is left alone.
    """
    from vllm.multimodal.registry import MultiModalRegistry

    create = MultiModalRegistry.create_processor
    if getattr(create, "is_prepared", False):
        return

    def create_processor(self: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        processor = create(self, model_config, *args, **kwargs)
        largest = _largest(model_config)
        if largest is not None:
            processor.info.get_mm_max_tokens_per_item = lambda *_, **__: {
                _MODALITY: num_embeddings(largest, _image_token_id(model_config.hf_config))
            }
            processor.get_dummy_mm_inputs = lambda *_, **__: _dummy(processor, largest)
        return processor

    create_processor.is_prepared = True  # type: ignore[attr-defined]
    MultiModalRegistry.create_processor = create_processor
    inputs = getattr(MultiModalRegistry, "get_dummy_mm_inputs", None)  # until vLLM 0.28 or so it is asked here
    if inputs is None:
        return

    def get_dummy_mm_inputs(self: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        largest = _largest(model_config)
        if largest is None:
            return inputs(self, model_config, *args, **kwargs)
        return _dummy(self.create_processor(model_config), largest)

    MultiModalRegistry.get_dummy_mm_inputs = get_dummy_mm_inputs


def _largest(model_config: Any) -> str | None:
    """Return the image that a model was started with, by `engine_arguments`."""
    settings: Mapping[str, Any] = model_config.multimodal_config.mm_processor_kwargs or {}
    return settings.get(_KEY)


def _dummy(processor: Any, largest: str) -> dict[str, Any]:
    return {"mm_kwargs": {_MODALITY: [_item(processor, largest)]}}


@contextmanager
def without_torchvision() -> Iterator[None]:
    """Let classes of models be imported where torchvision is not installed.

    vLLM's files of models take functions from files of transformers that import torchvision: to compute sizes of images
    that nobody asks for here. An empty torchvision is found inside the context; what was imported with it is forgotten
    by the rest of the process.
    """
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    finder, known = _EmptyTorchvision(), set(sys.modules)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - known:
            module = sys.modules[name]
            if name.partition(".")[0] == _TORCHVISION or _uses_torchvision(module):
                del sys.modules[name]
                parent, _, last = name.rpartition(".")
                if parent in sys.modules and vars(sys.modules[parent]).get(last) is module:
                    delattr(sys.modules[parent], last)


def _uses_torchvision(module: ModuleType) -> bool:
    return module.__name__.startswith("transformers.") and any(
        isinstance(value, ModuleType) and value.__name__.partition(".")[0] == _TORCHVISION
        for value in vars(module).values()
    )


# Parts of vLLM's models that transformers has without the name in between.
_NAMES = {
    "LlavaForConditionalGeneration": {
        f"vision_tower.{part}": f"vision_tower.vision_model.{part}"
        for part in ("embeddings.", "encoder.", "pre_layrnorm.", "post_layernorm.")
    }
}


def learn_names(model_class: Any) -> None:
    """Let a class of vLLM take weights under the names of the transformers that is installed."""
    names = _NAMES.get(model_class.__name__)
    table = getattr(model_class, "hf_to_vllm_mapper", None)
    if names is not None and table is not None and not names.keys() <= table.orig_to_new_prefix.keys():
        model_class.hf_to_vllm_mapper = replace(table, orig_to_new_prefix={**table.orig_to_new_prefix, **names})


class _EmptyTorchvision(MetaPathFinder, Loader):
    """Finds empty modules for every name of torchvision."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        is_ours = name.partition(".")[0] == _TORCHVISION
        return ModuleSpec(name, self, is_package=True) if is_ours else None

    def exec_module(self, module: ModuleType) -> None:
        pass


def num_embeddings(image: str, image_token_id: int) -> int:
    """Count the tokens of a prepared image that are replaced by outputs of the visual encoder."""
    return tokens_of(image).count(image_token_id)


class ImageInputs:
    """Makes vLLM's inputs of prepared images, for one model."""

    def __init__(self, model_config: Any, options: ImageOptions):
        from vllm.multimodal import MULTIMODAL_REGISTRY

        processor = MULTIMODAL_REGISTRY.create_processor(model_config)
        self._item = functools.lru_cache(maxsize=_CACHED)(functools.partial(_item, processor))
        self._tokens = functools.lru_cache(maxsize=_CACHED)(tokens_of)  # a file is opened once, not by every request
        self._image_token_id = _image_token_id(model_config.hf_config)
        self._max_images = options.max_images
        self._max_embeddings = num_embeddings(options.largest, self._image_token_id)

    def features(self, token_ids: Sequence[int], images: Sequence[str], salt: str | None) -> list[Any]:
        """Return one input per image, in the order of their tokens.

        salt: outputs of the visual encoder are shared by requests of the same one alone.
        """
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

        made = []
        for image, offset in zip(images, self.places(token_ids, images), strict=True):
            tokens = self._tokens(image)
            is_replaced = torch.tensor([token_id == self._image_token_id for token_id in tokens])
            made.append(
                MultiModalFeatureSpec(
                    data=self._item(image),
                    modality=_MODALITY,
                    identifier=Path(image).stem if salt is None else f"{Path(image).stem}@{salt}",
                    mm_position=PlaceholderRange(
                        offset=offset, length=len(tokens), is_embed=None if is_replaced.all() else is_replaced
                    ),
                )
            )
        return made

    def places(self, token_ids: Sequence[int], images: Sequence[str]) -> list[int]:
        """Return where the tokens of each image begin. Raises a `UserError` if vLLM cannot take them."""
        if len(images) > self._max_images:
            raise UserError(
                f"{len(images)} images in a request, more than data.max_images_per_prompt allows ({self._max_images})"
            )
        offsets, start = [], 0
        for image in images:
            tokens = self._tokens(image)
            num_replaced = tokens.count(self._image_token_id)
            if num_replaced > self._max_embeddings:
                raise UserError(
                    f"an image of {num_replaced} tokens, and vLLM was started for images of {self._max_embeddings}"
                )
            offsets.append(self._find(token_ids, tokens, start))
            start = offsets[-1] + len(tokens)
        return offsets

    def _find(self, token_ids: Sequence[int], tokens: tuple[int, ...], start: int) -> int:
        """Return where the tokens of an image begin, at `start` or after it."""
        first = tokens.index(self._image_token_id)
        try:
            offset = list(token_ids).index(self._image_token_id, start) - first
        except ValueError:
            offset = -1
        if offset < start or tuple(token_ids[offset : offset + len(tokens)]) != tokens:
            raise UserError("the tokens of a request do not have the placeholders of its images")
        return offset


def _item(processor: Any, image: str) -> Any:
    """Return the pixels of a prepared image as vLLM's model takes them."""
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalKwargsItems

    dtype = processor.info.ctx.model_config.dtype
    pixels = {name: each.to(dtype) if each.is_floating_point() else each for name, each in pixels_of(image).items()}
    if pixels["pixel_values"].ndim == 5:  # [1, tiles, channels, height, width]: vLLM has the tiles of all in a row
        pixels = {name: tensor[0] for name, tensor in pixels.items()}
        pixels["num_patches"] = torch.tensor([len(pixels["pixel_values"])])
    made = BatchFeature(pixels)
    return MultiModalKwargsItems.from_hf_inputs(made, processor._get_mm_fields_config(made, {}))[_MODALITY][0]


def _image_token_id(config: Any) -> int:
    return int(getattr(config, "image_token_id", None) or config.image_token_index)
