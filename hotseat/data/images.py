"""Images of rows: read, checked and prepared once, before a model loads.

A row's image is a path (relative ones from the folder of the data file), bytes, a `data:` URI, an image of Pillow, or
an object with `bytes` or `path`, as `datasets` stores them. Whatever is wrong with one is a `BadValue`, so that all bad
rows are named in one error. It quotes nothing of a file, and so no error of Pillow: a path may lead to any file, and
errors are logged and sent. Nothing is decoded before its header was found to be within the limits.

`ImageStore` prepares an image with the processor of the model, and writes the tensors that the model's forward takes,
and the tokens that stand for the image in a prompt, to a file whose name is a digest of the image and of everything
that decides how it is prepared. Equal images are prepared once, also by later runs with the same folder.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import io
import json
import shutil
import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hotseat.data.chat_rendering import Messages, messages_of
from hotseat.data.row_problems import BadValue, from_rows, kind_of
from hotseat.data.rows import Row
from hotseat.errors import DataError, UserError
from hotseat.model_source import ModelSource
from hotseat.vision import TOKENS, PreparedImage, expand_images, tokens_of

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_FORMAT = 2  # of the files; raised when what is written for the same image and processor changes
_SMALL, _LARGE, _STEP = 64, 4096, 16  # sides of squares among which the largest is sought, and how closely
_THUMBNAIL = 112  # pixels of the longer edge
# What a processor says about text, and about the class that it is part of.
_OF_TEXT = ("chat_template", "processor_class")
# What processors return about tokens; all else belongs to the pixels.
OF_TOKENS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")


@dataclass(frozen=True)
class ImageLimits:
    """Bounds on the images of a row."""

    max_images: int  # of a row
    max_bytes: int  # of an image as it is stored
    max_pixels: int  # width times height


def images_of(values: Mapping[str, Any], key: str, limits: ImageLimits) -> list[Any]:
    """Return the images under a key, as they are written; a row without the key, or with null, has none."""
    value = values.get(key)
    if value is None:
        return []
    listed = list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray) else [value]
    if len(listed) > limits.max_images:
        raise BadValue(
            f"{key}: {len(listed)} images, more than data.max_images_per_prompt allows ({limits.max_images}): raise it,"
            " or shorten the row"
        )
    return listed


def read_image(value: Any, key: str, folder: Path, limits: ImageLimits) -> Any:
    """Return an image, decoded, upright and in RGB."""
    import PIL.Image
    import PIL.ImageOps

    if _is_decoded(value):
        _check_size(value, key, limits)
        return value.convert("RGB")
    stored = _bytes_of(value, key, folder, limits)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)  # our own limit is checked below
        try:
            image = PIL.Image.open(io.BytesIO(stored), formats=FORMATS)
        except PIL.UnidentifiedImageError:
            raise BadValue(
                f"{key}: not an image in one of the formats {', '.join(FORMATS)}; it has {len(stored):,} bytes"
            ) from None
        except PIL.Image.DecompressionBombError as error:
            raise BadValue(f"{key}: {len(stored):,} bytes that may be meant to fill the memory: {error}") from None
        except Exception as error:  # Pillow's readers raise many kinds for broken headers
            raise BadValue(f"{key}: broken or truncated ({type(error).__name__})") from None
        _check_size(image, key, limits)
        try:
            frames = getattr(image, "n_frames", 1)  # seeks through the later ones
            if frames == 1:
                image.load()
                return PIL.ImageOps.exif_transpose(image).convert("RGB")
        except Exception as error:
            raise BadValue(f"{key}: broken or truncated {image.format} ({type(error).__name__})") from None
    raise BadValue(f"{key}: {image.format} with {frames} frames, and a prompt takes still images: choose one")


def _is_decoded(value: Any) -> bool:
    import PIL.Image

    return isinstance(value, PIL.Image.Image)


def _check_size(image: Any, key: str, limits: ImageLimits) -> None:
    width, height = image.size
    if width * height > limits.max_pixels:
        raise BadValue(
            f"{key}: {width} x {height} pixels, more than data.max_image_pixels allows ({limits.max_pixels:,}): make"
            " the image smaller, or raise the limit"
        )


def _bytes_of(value: Any, key: str, folder: Path, limits: ImageLimits) -> bytes:
    if isinstance(value, Mapping):
        inside = next((value[name] for name in ("bytes", "path", "url") if value.get(name) is not None), None)
        if inside is None or isinstance(inside, Mapping):
            raise BadValue(f"{key}: an object without bytes or path")
        return _bytes_of(inside, key, folder, limits)
    if isinstance(value, bytes | bytearray):
        _check_bytes(len(value), key, limits)
        return bytes(value)
    if not isinstance(value, str):
        raise BadValue(f"{key}: {kind_of(value)}, neither a path nor the bytes of an image")
    if value.startswith("data:"):
        head, comma, encoded = value.partition(",")
        if not comma or not head.endswith(";base64"):
            raise BadValue(f"{key}: a data URI that is not in base64: {value[:40]!r}")
        _check_bytes(len(encoded) * 3 // 4, key, limits)
        try:
            return base64.b64decode(encoded, validate=True)
        except ValueError as error:  # binascii.Error is one, too
            raise BadValue(f"{key}: a data URI with broken base64 ({error})") from None
    if "://" in value and not value.startswith("file://"):
        raise BadValue(
            f"{key}: {value!r:.100} is on another machine, and images are read from files: fetch them, and give paths"
        )
    path = folder / Path(value.removeprefix("file://")).expanduser()
    try:
        if not path.is_file():
            raise BadValue(f"{key}: no such file: {path}")
        _check_bytes(path.stat().st_size, key, limits)
        return path.read_bytes()
    except OSError as error:
        raise BadValue(f"{key}: {path}: {error.strerror or error}") from None


def _check_bytes(num_bytes: int, key: str, limits: ImageLimits) -> None:
    if num_bytes > limits.max_bytes:
        raise BadValue(
            f"{key}: {num_bytes:,} bytes, more than data.max_image_bytes allows ({limits.max_bytes:,}): make the image"
            " smaller, or raise the limit"
        )


# --- preparing --------------------------------------------------------------------------------------------------------


def load_processor(model: ModelSource, tokenizer: Any) -> Any:
    """Load the processor of a model, for images alone and by Pillow (`hotseat.vision` says why)."""
    from transformers import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    config = model.config()
    kind = type(config)
    if kind not in PROCESSOR_MAPPING:
        raise UserError(f"{model}: transformers has no processor of images for {kind.__name__.removesuffix('Config')}")
    whole = PROCESSOR_MAPPING[kind]
    parts = ["image_processor", "tokenizer"]
    own: Any = type(whole.__name__, (whole,), {"get_attributes": classmethod(lambda _: parts)})
    try:
        images = AutoImageProcessor.from_pretrained(model.name, backend="pil", **model.arguments)
        settings, _ = own.get_processor_dict(model.name)
        without = {name: value for name, value in settings.items() if not name.endswith(("_processor", "_class"))}
        if "video_processor" in inspect.signature(whole.__init__).parameters:
            without["video_processor"] = None
        return own(images, tokenizer, **without)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise UserError(f"{model}: its processor of images cannot be made: {error}") from None


def preparation(processor: Any) -> dict[str, Any]:
    """Return everything besides the vocabulary that decides how a processor prepares images, by name."""
    own = {name: value for name, value in vars(processor).items() if isinstance(value, int | float | str)}
    all_facts = own | processor.image_processor.to_dict()
    all_facts["image_processor_type"] = type(processor.image_processor).__name__
    return {name: fact for name, fact in all_facts.items() if name not in _OF_TEXT}


def processor_template(model: str) -> str | None:
    """Return the chat template of a model's processor, which may be in files that tokenizers do not read."""
    from transformers import ProcessorMixin

    settings, _ = ProcessorMixin.get_processor_dict(model)
    template: str | dict[str, str] | None = settings.get("chat_template")
    return template.get("default") if isinstance(template, dict) else template


class ImageStore:
    """Prepares images for a model, each once, in a folder of files.

    other_folder: of another store; an image that is there is taken from there.
    """

    def __init__(self, folder: Path, processor: Any, limits: ImageLimits, other_folder: Path | None = None):
        self.folder, self.limits = folder, limits
        self._other_folder = other_folder
        self.image_token_id = int(processor.tokenizer.convert_tokens_to_ids(processor.image_token))
        self.image_token: str = processor.image_token
        self._processor = processor
        # The stored tokens come from the tokenizer: another vocabulary needs files of its own.
        tokens = json.dumps(processor.tokenizer.get_vocab(), sort_keys=True)
        text = f"{_FORMAT}{json.dumps(preparation(processor), sort_keys=True, default=str)}{tokens}"
        self._how = hashlib.blake2b(text.encode(), digest_size=16).digest()
        self._known: dict[str, PreparedImage] = {}
        self._token_ids: dict[tuple[int, ...], tuple[int, ...]] = {}  # one object for all images of a size
        self.num_bytes = 0  # of the files of all images that were asked for
        folder.mkdir(parents=True, exist_ok=True)

    def prepare(self, value: Any, key: str, folder: Path) -> PreparedImage:
        """Return the prepared image, from the folder if it is there. Raises `BadValue`."""
        if _is_decoded(value):
            _check_size(value, key, self.limits)
            stored = f"{value.size}".encode() + value.convert("RGB").tobytes()
        else:
            value = stored = _bytes_of(value, key, folder, self.limits)
        digest = hashlib.blake2b(stored, key=self._how, digest_size=20).hexdigest()
        if digest not in self._known:  # those were decoded before: conversations show the same images again and again
            image = read_image(value, key, folder, self.limits)
            name = f"{digest}.safetensors"
            path = self.folder / name
            if self._other_folder is not None and (self._other_folder / name).exists():
                path = self._other_folder / name
            elif not path.exists():
                self._write(path, image, key)
            self._known[digest] = self._read(path)
            self.num_bytes += path.stat().st_size
        return self._known[digest]

    def write_filler(self, path: Path) -> None:
        """Write a small grey image, prepared, to a file."""
        self._write(path, _grey_square(_SMALL), "filler")

    def write_largest(self, path: Path, max_tokens: int, *, with_others: bool = False) -> None:
        """Write the prepared image of the most tokens to a file, unless that has one of as many.

        max_tokens: those of more fit into no context, and are left out, as their rows are. with_others: count a square
        of about so many tokens, too, for images that are not prepared yet.
        """
        known = sorted(self._known.values(), key=lambda image: len(image.token_ids))
        largest = next((image for image in reversed(known) if len(image.token_ids) <= max_tokens), known[0])
        if with_others:
            square = self._largest_square(max_tokens)
            largest = max(largest, square, key=lambda image: len(image.token_ids))
        if path.exists() and len(tokens_of(str(path))) >= len(largest.token_ids):
            return
        whole = _beside(path)
        shutil.copyfile(largest.path, whole)
        whole.replace(path)

    def _largest_square(self, max_tokens: int) -> PreparedImage:
        """Prepare a grey square of about as many tokens as it may have, found by halving."""
        low, high = _SMALL, int(min(self.limits.max_pixels, _LARGE**2) ** 0.5)
        while high - low > _STEP:
            side = (low + high) // 2
            token_ids, _ = self._process(_grey_square(side), "a grey square")
            low, high = (side, high) if len(token_ids) <= max_tokens else (low, side)
        path = self.folder / f"grey-{self._how.hex()}-{low}.safetensors"
        if not path.exists():
            self._write(path, _grey_square(low), "a grey square")
        return self._read(path)

    def _process(self, image: Any, key: str) -> tuple[list[int], dict[str, Any]]:
        """Return the tokens that stand for an image, and its pixels by the names of the forward's arguments."""
        try:
            # Without a token for the beginning of text: what is made here stands in the middle of a prompt.
            made = self._processor(
                text=[self.image_token], images=[image], return_tensors="pt", add_special_tokens=False
            )
        except (ValueError, ZeroDivisionError) as error:
            raise BadValue(f"{key}: the model's processor does not take it: {error}") from None
        pixels = {name: tensor.contiguous() for name, tensor in made.items() if name not in OF_TOKENS}
        return made["input_ids"][0].tolist(), pixels

    def _write(self, path: Path, image: Any, key: str) -> None:
        from safetensors.torch import save

        token_ids, pixels = self._process(image, key)
        whole = _beside(path)
        thumbnail = whole.with_name(f"{whole.name}.png")
        try:
            whole.write_bytes(save(pixels, {TOKENS: json.dumps(token_ids)}))
            small = image.copy()
            small.thumbnail((_THUMBNAIL, _THUMBNAIL))
            small.save(thumbnail)  # for the report
            thumbnail.replace(path.with_suffix(".png"))
            whole.replace(path)
        except OSError as error:
            raise DataError(f"{path}: a prepared image cannot be written: {error.strerror or error}") from None
        finally:
            whole.unlink(missing_ok=True)
            thumbnail.unlink(missing_ok=True)

    def _read(self, path: Path) -> PreparedImage:
        token_ids = tokens_of(str(path))
        return PreparedImage(str(path), self._token_ids.setdefault(token_ids, token_ids))

    @property
    def num_images(self) -> int:
        return len(self._known)


def _grey_square(side: int) -> Any:
    import PIL.Image

    return PIL.Image.new("RGB", (side, side), (128, 128, 128))


def _beside(path: Path) -> Path:
    """Name a file to write before it replaces another. Processes of several machines may have the same id."""
    return path.with_suffix(f".{uuid.uuid4().hex}")


@dataclass(frozen=True)
class RowImages:
    """The images of one row, in order, to be put in the places of their tokens."""

    images: tuple[PreparedImage, ...]
    image_token_id: int

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(image.path for image in self.images)

    def expand(self, token_ids: Sequence[int], key: str) -> tuple[list[int], list[int]]:
        """Expand the images as `expand_images` does; a text that has another number of places is a `BadValue`."""
        num_places = list(token_ids).count(self.image_token_id)
        if num_places != len(self.images):
            raise BadValue(
                f"{key}: the prompt has places for {num_places} images, and the row has {len(self.images)}: in"
                ' messages write {"type": "image"} where each one goes, in plain text the image token of the model'
            )
        return expand_images(token_ids, self.image_token_id, self.images)


# --- rows -------------------------------------------------------------------------------------------------------------

MARK = "<image>"  # in the text of a message: an image goes here
_PARTS = ("image", "image_url")  # types of parts of a message that are images


def prepare_rows(rows: Sequence[Row], store: ImageStore, image_key: str, *input_keys: str, is_chat: bool) -> list[Row]:
    """Return rows with `RowImages` under `image_key`, prepared, and messages in which each image is a part of its own.

    is_chat: `input_keys` have messages, or a string that becomes the user's. Of several, each is a whole conversation
    about the same images. Images may also stand in the messages, as parts of type image or image_url. Those of
    `image_key` go where messages have parts or marks for them, or else in front of the first message of the user.
    Raises one error that names all bad rows.
    """

    def prepared(row: Row) -> Row:
        listed = images_of(row.values, image_key, store.limits)
        changed, inside = _in_messages(row, input_keys, len(listed)) if is_chat else ({}, [])
        if inside and listed:
            both = " and ".join(input_keys)
            raise BadValue(f"{both}: its messages contain images, and so does {image_key}: give them once")
        listed = listed or images_of({input_keys[0]: inside}, input_keys[0], store.limits)
        keys = [image_key if len(listed) == 1 else f"{image_key}[{at}]" for at in range(len(listed))]
        folder = Path(row.file).parent
        images = tuple(store.prepare(value, key, folder) for value, key in zip(listed, keys, strict=True))
        changed[image_key] = RowImages(images, store.image_token_id)
        return replace(row, values={**row.values, **changed})

    return from_rows(rows, prepared)


def _in_messages(row: Row, keys: Sequence[str], num_images: int) -> tuple[dict[str, Any], list[Any]]:
    """Return messages with one part for each image, by their key, and the images that stand in them."""
    changed: dict[str, Any] = {}
    images_of: dict[str, list[Any]] = {}
    for key in keys:
        value = row.values.get(key)
        is_conversation = len(keys) == 1 or not isinstance(value, str)  # others are refused where texts are made
        if value is not None and is_conversation:
            changed[key], images_of[key] = _with_places(messages_of(row.values, key, "user"), num_images, key)
    each = list(images_of.values())
    if any(images != each[0] for images in each):
        raise BadValue(f"{' and '.join(images_of)}: their messages contain different images, and a pair has one prompt")
    return changed, each[0] if each else []


def _with_places(messages: Messages, num_images: int, key: str) -> tuple[Messages, list[Any]]:
    """Return messages with one part for each image, and the images that stand in them."""
    inside: list[Any] = []
    has_places = False
    changed: Messages = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and MARK in content and num_images:
            pieces = [[{"type": "text", "text": piece}] if piece else [] for piece in content.split(MARK)]
            content = pieces[0] + [part for piece in pieces[1:] for part in ({"type": "image"}, *piece)]
            has_places = True
        elif isinstance(content, Sequence) and not isinstance(content, str):
            parts = [_part(part, inside, key) for part in content]
            has_places |= any(part.get("type") == "image" for part in parts)
            content = parts
        changed.append({**message, "content": content} if content is not None else message)
    if num_images and not has_places:
        first = next((at for at, message in enumerate(changed) if message["role"] == "user"), None)
        if first is None:
            raise BadValue(f"{key}: no message by the user, in front of which the images would go")
        content = changed[first].get("content") or ""
        text = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        changed[first] = {**changed[first], "content": [*[{"type": "image"}] * num_images, *text]}
    return changed, inside


def _part(part: Any, inside: list[Any], key: str) -> dict[str, Any]:
    """Return a part of a message; of an image only its type, and the image itself is added to `inside`."""
    if not isinstance(part, Mapping):
        raise BadValue(f"{key}: a message has content with {kind_of(part)}, not with parts that have a type")
    kind = part.get("type") or next((name for name in _PARTS if part.get(name) is not None), None)
    if kind not in _PARTS:
        # Columnar files fill in nulls for keys that only other parts have.
        return {name: value for name, value in part.items() if value is not None}
    value: Any = next((part[name] for name in (*_PARTS, "bytes", "path", "url") if part.get(name) is not None), None)
    if value is not None:
        inside.append(value)
    return {"type": "image"}
