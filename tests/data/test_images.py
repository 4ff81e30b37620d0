"""Images of rows: what is read, and what is refused by name before a model loads."""

import base64
import io
import math
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hotseat.data.images import ImageLimits, RowImages, images_of, prepare_rows, read_image
from hotseat.data.row_problems import BadValue
from hotseat.data.rows import Row
from hotseat.envs.simulator import ActionSpec
from hotseat.envs.tokens import NumberTokens
from hotseat.errors import DataError
from hotseat.observe.report.samples import pack
from hotseat.vision import PreparedImage

LIMITS = ImageLimits(max_images=2, max_bytes=100_000, max_pixels=10_000)
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8))


def encoded(image: Image.Image = PICTURE, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def bomb(width: int, height: int) -> bytes:
    """Make a PNG of a few kilobytes that would decode to very many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * ((width // 8 + 1) * 100))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_an_image_is_read_from_everything_that_rows_hold(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded())
    uri = "data:image/png;base64," + base64.b64encode(encoded()).decode()
    forms = [
        "a.png",
        str(tmp_path / "a.png"),
        encoded(),
        uri,
        {"bytes": encoded(), "path": None},
        {"path": "a.png"},
        PICTURE,
    ]
    for form in forms:
        image = read_image(form, "image", tmp_path, LIMITS)
        assert (image.mode, image.size) == ("RGB", (30, 20))
        assert image.tobytes() == PICTURE.tobytes()


def test_an_image_stands_as_its_camera_was_held(tmp_path):
    rotated = Image.Exif()
    rotated[0x0112] = 6  # to be turned by a quarter
    image = read_image(encoded(kind="JPEG", exif=rotated), "image", tmp_path, LIMITS)
    assert image.size == (20, 30)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("gone.png", "photo: no such file: .*gone.png"),
        ("https://example.com/a.png", "is on another machine, and images are read from files"),
        ("data:image/png,abc", "a data URI that is not in base64"),
        ("data:image/png;base64,a", "a data URI with broken base64"),
        ("data:image/png;base64,\u00e9", "a data URI with broken base64"),
        (7, "photo: a number, neither a path nor the bytes"),
        ({"height": 3}, "photo: an object without bytes or path"),
        (b"hello, this is a text", "photo: not an image in one of the formats PNG, .*; it has 21 bytes"),
        (b"", "photo: not an image"),
        (encoded()[:200], "photo: broken or truncated PNG"),
        (encoded(kind="JPEG")[:-300], "photo: broken or truncated .*OSError"),
        (
            encoded(PICTURE.resize((200, 100))),
            r"photo: 200 x 100 pixels, more than data.max_image_pixels allows \(10,000\)",
        ),
        (
            bomb(100_000, 100_000),
            "photo: [0-9,]+ bytes that may be meant to fill the memory: .*10000000000 pixels",
        ),
        (b"\x89PNG" + bytes(200_000), r"photo: 200,004 bytes, more than data.max_image_bytes allows \(100,000\)"),
        (
            encoded(PICTURE, "GIF", save_all=True, append_images=[PICTURE.rotate(90)]),
            "photo: GIF with 2 frames, and a prompt takes still images",
        ),
        (
            encoded(PICTURE, "GIF", save_all=True, append_images=[PICTURE.rotate(90)])[:1520],  # within the second
            "photo: broken or truncated GIF",
        ),
    ],
)
def test_a_bad_image_is_refused_by_what_is_wrong_with_it(value, message, tmp_path):
    with pytest.raises(BadValue, match=message):
        read_image(value, "photo", tmp_path, LIMITS)


@pytest.mark.parametrize(
    "text", ["hunter2", "P3 hunter2 1 255\n1 2 3", "P1\n2 1\nhunter2", "P3 1 1 255\nhunter2hunter2"]
)
def test_an_error_about_a_file_quotes_nothing_of_it(text, tmp_path):
    """Some are PPM images to Pillow, whose errors quote what is wrong."""
    (tmp_path / "secrets.env").write_text(text)
    with pytest.raises(BadValue) as caught:
        read_image("secrets.env", "photo", tmp_path, LIMITS)
    assert "hunter" not in str(caught.value)


def test_a_row_has_no_more_images_than_allowed():
    assert images_of({}, "images", LIMITS) == images_of({"images": None}, "images", LIMITS) == []
    assert images_of({"images": "one.png"}, "images", LIMITS) == ["one.png"]
    with pytest.raises(BadValue, match=r"images: 3 images, more than data.max_images_per_prompt allows \(2\)"):
        images_of({"images": ["a", "b", "c"]}, "images", LIMITS)


def test_tokens_of_images_replace_their_places():
    first, second = PreparedImage("a", (7, 9, 9, 8)), PreparedImage("b", (9,))
    images = RowImages((first, second), image_token_id=9)
    assert images.expand([1, 9, 2, 9], "input") == ([1, 7, 9, 9, 8, 2, 9], [0, 1, 5, 6, 7])
    with pytest.raises(BadValue, match="places for 1 images, and the row has 2"):
        images.expand([1, 9, 2], "input")


class Store:
    """A store that prepares nothing, and remembers what it was asked for."""

    limits, image_token_id = LIMITS, 9

    def __init__(self):
        self.asked = []

    def prepare(self, value, key, folder):
        self.asked.append((value, key, folder))
        if value == "bad":
            raise BadValue(f"{key}: bad")
        return PreparedImage(str(value), (9,))


def prepared(values, *, is_chat=True, store=None):
    store = store or Store()
    [row] = prepare_rows([Row(values, "there/x.jsonl", 1, True)], store, "images", "input", is_chat=is_chat)
    return row.values


def test_images_without_places_go_in_front_of_the_first_message_of_the_user():
    values = prepared({"input": [{"role": "system", "content": "be"}, {"role": "user", "content": "q"}], "images": "a"})
    assert values["input"][1]["content"] == [{"type": "image"}, {"type": "text", "text": "q"}]
    assert values["images"].paths == ("a",)
    assert prepared({"input": "q", "images": None})["input"] == [{"role": "user", "content": "q"}]


def test_marks_and_parts_of_messages_are_places():
    values = prepared({"input": "<image>is it <image>?", "images": ["a", "b"]})
    parts = [{"type": "image"}, {"type": "text", "text": "is it "}, {"type": "image"}, {"type": "text", "text": "?"}]
    assert values["input"] == [{"role": "user", "content": parts}]
    store = Store()
    content = [
        {"type": "text", "text": "what", "image": None},
        {"type": "image_url", "image_url": {"url": "b.png"}},
        {"type": "image", "image": "c.png"},
    ]
    values = prepared({"input": [{"role": "user", "content": content}]}, store=store)
    assert [part["type"] for part in values["input"][0]["content"]] == ["text", "image", "image"]
    assert [value for value, _, _ in store.asked] == [{"url": "b.png"}, "c.png"]
    assert {folder for _, _, folder in store.asked} == {Path("there")}
    with pytest.raises(DataError, match="its messages contain images, and so does images: give them once"):
        prepared({"input": [{"role": "user", "content": content}], "images": "a"})


def test_all_bad_rows_are_named_in_one_error():
    rows = [
        Row({"input": "q", "images": image}, "x.jsonl", at, True) for at, image in enumerate(["a", "bad", 3, "bad"], 1)
    ]
    with pytest.raises(DataError) as caught:
        prepare_rows(rows, Store(), "images", "input", is_chat=False)
    assert str(caught.value) == "1 problem in the data:\n  x.jsonl:2, x.jsonl:4: images: bad"


class Processor:
    """A processor of a model, as far as a store asks it."""

    image_token = "<i>"

    def __init__(self, size, image_token_id=9, pixels_per_token=None):
        self.num_calls, self.size, self.image_processor, self.tokenizer = 0, size, self, self
        self._pixels_per_token = pixels_per_token  # along an edge; None: two tokens for every image
        self._vocabulary = {"<i>": image_token_id}

    def get_vocab(self):
        return self._vocabulary

    def to_dict(self):
        return {"size": self.size}

    def convert_tokens_to_ids(self, token):
        return 9

    def __call__(self, text, images, return_tensors, add_special_tokens):
        import torch

        assert not add_special_tokens
        self.num_calls += 1
        if images[0].size[0] == 1:
            raise ValueError("too narrow")
        num_tokens = 2 if self._pixels_per_token is None else math.prod(images[0].size) // self._pixels_per_token**2
        return {"input_ids": torch.tensor([[7, *[9] * num_tokens]]), "pixel_values": torch.ones(self.size, 2)}


def test_a_store_prepares_an_image_once_and_for_one_processor(tmp_path):
    pytest.importorskip("torch")
    from hotseat.data.images import ImageStore
    from hotseat.vision import pixels_of, tokens_of

    processor = Processor(3)
    store = ImageStore(tmp_path, processor, LIMITS)
    one, same = store.prepare(encoded(), "image", tmp_path), store.prepare({"bytes": encoded()}, "image", tmp_path)
    assert one == same
    assert processor.num_calls == store.num_images == 1
    assert one.token_ids == tokens_of(one.path) == (7, 9, 9)
    assert pixels_of(one.path)["pixel_values"].shape == (3, 2)
    assert ImageStore(tmp_path, Processor(3), LIMITS).prepare(encoded(), "image", tmp_path) == one
    assert processor.num_calls == 1
    for other in (Processor(4), Processor(3, image_token_id=8)):
        assert ImageStore(tmp_path, other, LIMITS).prepare(encoded(), "image", tmp_path).path != one.path
    with pytest.raises(BadValue, match="image: the model's processor does not take it: too narrow"):
        store.prepare(Image.new("RGB", (1, 20)), "image", tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == len(list(tmp_path.iterdir())) / 2 == 3
    # What another store has is taken from there, and what it has not is written here.
    beside = ImageStore(tmp_path / "beside", Processor(3), LIMITS, tmp_path)
    assert beside.prepare(encoded(), "image", tmp_path) == one
    drawn = beside.prepare(Image.new("RGB", (20, 20)), "image", tmp_path)
    assert [file.name for file in beside.folder.glob("*.safetensors")] == [Path(drawn.path).name]
    # Its thumbnail cannot be written: nothing is left of the image.
    store = ImageStore(tmp_path / "full", processor, LIMITS)
    (store.folder / "filler.png").mkdir()
    with pytest.raises(DataError, match="filler.safetensors: a prepared image cannot be written: Is a directory"):
        store.write_filler(store.folder / "filler.safetensors")
    assert [path.name for path in store.folder.iterdir()] == ["filler.png"]
    # The report shows a small copy of each that is there.
    first, again = pack({"images": [one.path, "gone", one.path]})["images"]
    assert (first, pack({})["images"]) == (again, [])
    assert Image.open(io.BytesIO(base64.b64decode(first.partition(",")[2]))).size == (30, 20)


def test_the_largest_image_is_one_that_a_context_has_room_for(tmp_path):
    pytest.importorskip("torch")
    from hotseat.data.images import ImageStore
    from hotseat.vision import tokens_of

    store = ImageStore(tmp_path, Processor(3, pixels_per_token=20), replace(LIMITS, max_pixels=1000 * 1000))
    for side in (40, 100, 200):  # 4, 25 and 100 tokens, and one before them
        store.prepare(Image.new("RGB", (side, side)), "image", tmp_path)
    small, other = (store.prepare(Image.new("RGB", (40, 40), name), "image", tmp_path) for name in ("black", "red"))
    assert small.path != other.path
    assert small.token_ids is other.token_ids  # a run may have a million images of one size
    path = tmp_path / "largest.safetensors"
    for max_tokens, expected in ((3, 5), (50, 26), (26, 26), (101, 101), (50, 101)):  # a file is not made smaller
        store.write_largest(path, max_tokens)
        assert len(tokens_of(str(path))) == expected
    before = set(tmp_path.iterdir())
    # Squares of at most 620 pixels have 961 tokens or fewer; the search ends at most 16 pixels below that.
    store.write_largest(path, 962, with_others=True)
    assert 1 + (604 * 604) // 400 <= len(tokens_of(str(path))) <= 962
    # The squares that were tried are not kept: one is, with its thumbnail.
    assert len(set(tmp_path.iterdir()) - before) == 2


def test_no_number_is_written_with_a_placeholder_of_images():
    def tokens(num_actions, placeholders):
        numbers = NumberTokens.of_actions(ActionSpec.numbered(num_actions), 256, 100, placeholders)
        return numbers.encode(np.arange(num_actions)), numbers

    assert tokens(4, (3, 95))[0] == [99, 98, 97, 96]  # none of the last four
    written, numbers = tokens(4, (98, 99))
    assert written == [97, 96, 95, 94]
    assert numbers.decode(written)[:, 0].tolist() == [0, 1, 2, 3]
    assert not any(map(numbers.is_bin, (98, 99, 93)))
    assert tokens(4, (98, 95))[0] == [94, 93, 92, 91]  # two ids between them are too few
