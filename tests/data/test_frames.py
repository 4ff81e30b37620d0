"""What a policy sees of a simulator: frames as MiniGrid draws them, packed and unpacked."""

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hotseat.envs.families import babyai
from hotseat.errors import UserError
from hotseat.vision import head_of_bytes, pack_bytes, pack_pixels, pixels_of

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "embodied"))


def test_views_in_pixels_are_those_that_minigrid_draws():
    pytest.importorskip("minigrid")
    random = np.random.default_rng(0)
    for task in ("BabyAI-GoToRedBallGrey-v0", "BabyAI-PickupLoc-v0"):
        simulator = babyai.make([task], max_steps=12, view="pixels")
        for seed in range(3):
            seen, is_over = simulator.reset(0, seed), False
            while not is_over:
                drawn = simulator.environments[0].unwrapped.get_pov_render(babyai.TILE)
                assert seen.image is not None
                assert seen.image.dtype == np.uint8
                assert np.array_equal(seen.image, drawn)
                step = simulator.step(np.array([float(random.integers(0, 7))]))
                seen, is_over = step.seen, step.terminated or step.truncated


@pytest.fixture(scope="module")
def preparer():
    pytest.importorskip("minigrid")
    import policy

    from hotseat.data.frames import FramePreparer

    return FramePreparer(policy.make_processor(policy.make_tokenizer()))


@pytest.mark.slow
def test_a_packed_frame_has_the_pixels_of_the_processor(preparer):
    from hotseat.vision import is_packed, pixels_of

    frame = np.random.default_rng(1).integers(0, 256, (56, 56, 3)).astype(np.uint8)
    prepared = preparer.prepare(frame)
    assert is_packed(prepared.image)
    [(name, pixels)] = pixels_of(prepared.image).items()
    assert name == "pixel_values"
    expected = (frame.astype(np.float64) / 255 - 0.5) / 0.5  # the processor's mean and deviation
    assert np.allclose(pixels[0].permute(1, 2, 0).numpy(), expected, atol=1e-6)
    assert len(prepared.token_ids) == 49  # a cell of 8 by 8 pixels is a patch
    assert preparer.prepare(frame.copy()) is prepared
    assert preparer.prepare(255 - frame).image != prepared.image


@pytest.mark.slow
def test_a_frame_that_no_policy_takes_is_refused(preparer):
    with pytest.raises(UserError, match="it must be uint8"):
        preparer.prepare(np.zeros((56, 56), dtype=np.uint8))


@pytest.mark.slow
def test_a_film_has_the_frames_of_an_episode_in_order(preparer):
    """Frames of 0 and 255 alone keep their colours."""
    import base64
    import io

    from PIL import Image

    from hotseat.data.frames import FILM, film_of

    size = babyai.REACH * babyai.TILE
    frames = [np.zeros((size, size, 3), dtype=np.uint8) for _ in range(3)]
    for at, frame in enumerate(frames):
        frame[:, at * 8 : at * 8 + 8, at] = 255
    film = film_of([preparer.prepare(frame).image for frame in frames])
    assert film is not None
    assert film.startswith(FILM)
    with Image.open(io.BytesIO(base64.b64decode(film.removeprefix(FILM)))) as shown:
        assert shown.n_frames == 3
        for at, frame in enumerate(frames):
            shown.seek(at)
            assert np.array_equal(np.asarray(shown.convert("RGB")), frame)


def test_packed_pixels_are_unpacked_as_they_were():
    import torch

    from hotseat.vision import pack_pixels, pixels_of

    noise = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for pixels in (torch.zeros(1, 3, 8, 8), noise):
        assert torch.equal(pixels_of(pack_pixels({"pixel_values": pixels}))["pixel_values"], pixels)


def test_runs_without_frames_of_one_shape_have_no_film_and_need_no_package_for_it(monkeypatch):
    import torch

    from hotseat.data.frames import film_of
    from hotseat.vision import pack_pixels

    def packed(*shape: int) -> str:
        return pack_pixels({"pixel_values": torch.zeros(shape)})

    monkeypatch.setitem(sys.modules, "PIL", None)  # importing it fails
    assert film_of([]) is None
    assert film_of([packed(1, 3, 8, 8), packed(1, 3, 8, 16)]) is None
    assert film_of([packed(4, 12), packed(4, 12)]) is None  # patches, not a picture


@pytest.mark.slow
def test_frames_whose_bytes_are_treated_one_by_one_have_every_bit_of_the_processor(preparer):
    """A processor that resizes is asked for every frame; one that does not, once."""
    import policy
    from transformers import LlavaProcessor
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    from hotseat.data.frames import FramePreparer
    from hotseat.vision import pixels_of

    resizing = FramePreparer(
        LlavaProcessor(
            SiglipImageProcessorPil(size={"height": 56, "width": 56}, image_mean=[0.1, 0.5, 0.9]),
            policy.make_tokenizer(),
            patch_size=8,
            vision_feature_select_strategy="full",
            image_token=policy.IMAGE,
        )
    )
    random = np.random.default_rng(2)
    for each, shape, is_asked in (
        (preparer, (56, 56, 3), False),
        (resizing, (56, 56, 3), False),
        (resizing, (64, 64, 3), True),
    ):
        frame = random.integers(0, 256, shape).astype(np.uint8)
        packed = pixels_of(each.prepare(frame).image)["pixel_values"]
        expected = each._processor.image_processor(images=[frame], return_tensors="pt")["pixel_values"]
        assert packed.dtype == expected.dtype
        assert np.array_equal(packed.numpy(), expected.numpy())
        assert (each._layouts[shape].palette is None) == is_asked


@pytest.mark.parametrize("edge", [8, 200])  # small ones stay as they are, large ones of one colour are compressed
def test_bytes_are_packed_as_tensors_are(edge):
    palette = torch.rand(3, 256, generator=torch.Generator().manual_seed(0))
    head = head_of_bytes((1, 3, edge, edge), palette)
    for value in (0, 7):
        codes = np.full((3, edge, edge), value, dtype=np.uint8)
        packed = pack_bytes(head, codes, "digest")
        expected = pack_pixels({"pixel_values": torch.from_numpy(codes)[None]}, palette, "digest")
        assert (packed, packed.stored, packed.is_compressed) == (expected, expected.stored, expected.is_compressed)
        assert packed.is_compressed == (edge == 200)
        assert torch.equal(packed.tensors()["pixel_values"][0], torch.from_numpy(codes))


@pytest.mark.slow
def test_a_packed_frame_travels_as_a_buffer_of_its_own(preparer):
    frame = np.random.default_rng(0).integers(0, 256, (56, 56, 3), dtype=np.uint8)
    image = preparer.prepare(frame).image
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps([image, image], protocol=5, buffer_callback=buffers.append)
    assert sum(buffer.raw().nbytes for buffer in buffers) >= frame.nbytes
    assert len(pickled) < 400  # the name, once, and nothing of the pixels
    there, again = pickle.loads(pickled, buffers=[bytearray(buffer.raw()) for buffer in buffers])
    assert there is again
    assert there == image
    assert torch.equal(pixels_of(there)["pixel_values"], pixels_of(image)["pixel_values"])
    for protocol in range(3, 6):  # without a callback, as in files
        copy = pickle.loads(pickle.dumps(image, protocol=protocol))
        assert (copy, copy.stored, copy.is_compressed) == (image, image.stored, image.is_compressed)


@pytest.mark.slow
def test_frames_are_equal_if_their_pixels_are(preparer):
    frame = np.random.default_rng(0).integers(0, 256, (56, 56, 3), dtype=np.uint8)
    other = frame.copy()
    other[3, 4, 1] ^= 1
    image, same, changed = (preparer.prepare(each).image for each in (frame, frame.copy(), other))
    assert image == same
    assert image != changed
    assert image != preparer.prepare(frame.reshape(28, 112, 3)).image  # the same bytes in another shape
    assert pack_pixels({"pixel_values": torch.zeros(1)}) != pack_pixels({"pixel_values": torch.ones(1)})
