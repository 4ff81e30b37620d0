"""Finished groups on disk: they come back as they were, and nothing in a file runs."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pickles import Bomb

from hotseat.algorithms.routing import ROUTING
from hotseat.errors import RunError
from hotseat.loop.workers.experience import Share, flatten
from hotseat.loop.workers.spool import Finished, Spool
from hotseat.types import Episode, EpisodeFacts, Prompt, PromptGroup, SampleKey, ScoredEpisode, Segment, TurnFacts
from hotseat.vision import PackedImage, pack_pixels, pixels_of

TENSORS = ("token_ids", "mask", "log_probs", "versions")


def segment(*token_ids: int, images: tuple[str, ...] = ()) -> Segment:
    mask = torch.tensor([False] + [True] * (len(token_ids) - 1))
    log_probs = torch.where(mask, torch.tensor(token_ids) / -3, 0.0).float()
    versions = torch.where(mask, 7, -1).int()
    return Segment(torch.tensor(token_ids), mask, log_probs, versions, images)


def finished(**changes: Any) -> Finished:
    """A group of two samples; `changes` of its prompt."""
    prompt = replace(Prompt(5, "2+2=", (3, 9, 151_643), "4", "sums"), **changes)
    facts = EpisodeFacts((TurnFacts(0.1, 0.30000000000000004, ("add(2)", "")), TurnFacts(1.0, 2.0)), 0.25, 3.5)
    first = Episode(SampleKey(1, 5, 0), (segment(3, 9, 4), segment(2, 8)), "2+2=4", False, (2, 1), facts, 2, True)
    other = Episode(SampleKey(1, 5, 2), (segment(3, 9, 1, 1, 1),), "2+2=é\ud83d中", True)
    samples = (
        ScoredEpisode(first, 1.0, 0.1 + 0.2, {"format": 1.0, "lost": math.inf}, (0.25, 0.75)),
        ScoredEpisode(other, -0.5, 0.0),
    )
    return Finished(1, PromptGroup(prompt, samples, 1), ((1, "it timed out"),), (1.5, 2.5), 0.125)


def assert_same(found: Finished, expected: Finished) -> None:
    assert (found.epoch, found.failures, found.episode_s, found.scoring_s) == (
        expected.epoch,
        expected.failures,
        expected.episode_s,
        expected.scoring_s,
    )
    assert (found.group.prompt, found.group.num_failed) == (expected.group.prompt, expected.group.num_failed)
    assert type(found.group.prompt.label) is type(expected.group.prompt.label)
    for mine, theirs in zip(found.group.samples, expected.group.samples, strict=True):
        for name in (field.name for field in fields(ScoredEpisode) if field.name != "episode"):
            assert getattr(mine, name) == getattr(theirs, name), name
        for name in (field.name for field in fields(Episode) if field.name != "segments"):
            assert getattr(mine.episode, name) == getattr(theirs.episode, name), name
        for one, other in zip(mine.episode.segments, theirs.episode.segments, strict=True):
            assert one.images == other.images
            for name in TENSORS:
                assert getattr(one, name).dtype == getattr(other, name).dtype
                assert torch.equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_experts_come_back_with_unknown_ones_where_a_segment_has_none(dtype: torch.dtype, tmp_path: Path) -> None:
    made = finished()
    first, *others = made.group.samples
    routing = torch.arange(12).view(3, 4).to(dtype)
    recorded = replace(first.episode.segments[0], routing=routing)
    episode = replace(first.episode, segments=(recorded, *first.episode.segments[1:]))
    made = replace(made, group=replace(made.group, samples=(replace(first, episode=episode), *others)))
    Spool(tmp_path).put(made)
    found = Spool(tmp_path).get(made.key)
    assert found is not None
    assert_same(found, made)
    one, two, three = (part.routing for sample in found.group.samples for part in sample.episode.segments)
    assert torch.equal(one, routing)
    assert two.tolist() == [[torch.iinfo(dtype).max] * 4] * 2
    assert (three.shape, three.dtype) == ((5, 4), dtype)
    share = pickle.loads(pickle.dumps(Share((found.group,), ((0, 0),))))
    assert torch.equal(flatten(share.groups).fields[ROUTING], torch.cat([one, two, three]))
    Spool(tmp_path).put(finished())
    plain = Spool(tmp_path).get(made.key)
    assert plain is not None
    assert ROUTING not in flatten([plain.group]).fields


@pytest.mark.parametrize(
    "label",
    ["4", "", None, 4, 4.0, 0.1, True, [1, [2, "x"], None], {"answer": 4, "tests": [{"in": "é\ud800"}]}, [], {}],
    ids=repr,
)
def test_a_group_comes_back_with_every_field_and_labels_of_every_type(tmp_path: Path, label: Any) -> None:
    spool = Spool(tmp_path)
    expected = finished(label=label)
    spool.put(expected)
    found = spool.get((1, 5))
    assert found is not None
    assert_same(found, expected)
    assert found.facts() == expected.facts()
    assert spool.get((1, 6)) is None


def test_a_group_without_samples_comes_back_too(tmp_path: Path) -> None:
    expected = Finished(0, PromptGroup(Prompt(0, "", ()), (), 2), ((0, "no"), (1, "no")))
    Spool(tmp_path).put(expected)
    found = Spool(tmp_path).get((0, 0))
    assert found is not None
    assert_same(found, expected)


def test_images_come_back_as_paths_or_with_their_pixels_and_each_is_stored_once(tmp_path: Path) -> None:
    noise = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    palette = torch.linspace(-1, 1, 256).repeat(3, 1)
    camera, drawn = (
        pack_pixels({"pixel_values": noise}, palette),
        pack_pixels({"pixel_values": torch.ones(1, 3, 64, 64)}),
    )
    assert (camera.is_compressed, drawn.is_compressed) == (False, True)
    path = "/runs/a/episode_images/é.safetensors"
    expected = finished(images=(path, drawn))
    shown = (segment(1, 2, images=(camera, path)), segment(1, 3), segment(1, 4, images=(camera,)))
    samples = tuple(replace(each, episode=replace(each.episode, segments=shown)) for each in expected.group.samples)
    expected = replace(expected, group=replace(expected.group, samples=samples))
    Spool(tmp_path).put(expected)
    found = Spool(tmp_path).get((1, 5))
    assert found is not None
    assert_same(found, expected)
    image, plain = found.group.samples[1].episode.segments[0].images
    assert isinstance(image, PackedImage)
    assert type(plain) is str
    assert torch.equal(pixels_of(image)["pixel_values"], palette[torch.arange(3)[:, None, None], noise.long()])
    assert torch.equal(pixels_of(found.group.prompt.images[1])["pixel_values"], torch.ones(1, 3, 64, 64))
    [file] = tmp_path.iterdir()
    assert file.stat().st_size < len(camera.stored) + len(drawn.stored) + 4000


def test_numbers_that_an_agent_left_in_numpys_types_are_kept_as_numbers(tmp_path: Path) -> None:
    group = finished().group
    sample = replace(group.samples[0], reward=np.float32(0.5), turn_rewards=(np.float64(0.25), np.int64(1)))
    Spool(tmp_path).put(Finished(1, replace(group, samples=(sample,)), (), (np.float32(2.0),)))
    found = Spool(tmp_path).get((1, 5))
    assert found is not None
    assert (found.group.samples[0].reward, found.episode_s) == (0.5, (2.0,))
    assert found.group.samples[0].turn_rewards == (0.25, 1)


def test_a_file_with_a_pickle_is_refused_and_does_not_run(tmp_path: Path) -> None:
    """Scenario 63: as a whole file, or behind the mark of a group."""
    spool, traces = Spool(tmp_path / "spool"), tmp_path / "went off"
    file = tmp_path / "spool" / "1-5.group"
    pickled = pickle.dumps(Bomb(traces))
    file.write_bytes(pickled)
    with pytest.raises(RunError, match="1-5.group cannot be read as a group of samples: it does not begin as one"):
        spool.get((1, 5))
    spool.put(finished())
    file.write_bytes(file.read_bytes()[:16] + pickled)
    with pytest.raises(RunError, match="1-5.group cannot be read as a group of samples: it is damaged"):
        spool.get((1, 5))
    file.write_bytes(b"{}")
    with pytest.raises(RunError, match="it does not begin as one"):
        spool.get((1, 5))
    assert not traces.exists()
    pickle.loads(pickled)
    assert traces.exists()


def test_a_file_that_is_cut_short_or_describes_something_else_is_refused(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.put(finished())
    [file] = tmp_path.iterdir()
    data = file.read_bytes()
    for size in [*range(8, 40), *range(40, len(data), 61), len(data) - 1]:
        file.write_bytes(data[:size])
        with pytest.raises(RunError, match="it is damaged"):
            spool.get((1, 5))
    file.write_bytes(data + b"\0")
    with pytest.raises(RunError, match=f"it has {len(data) + 1} bytes, and needs {len(data)}"):
        spool.get((1, 5))
    size = int.from_bytes(data[8:16], "little")
    for key, value, message in (
        ("arrays", [["|O", 1]] * 5, r"\|O is not a type of numbers"),
        ("arrays", [["<i8", -1]] * 5, "bytes, and needs"),
        ("texts", [5], "not enough values"),
        ("prompt", [5], "shorter than"),
        ("facts", {"epoch": 0}, "it is damaged .KeyError: .failures"),
        ("facts", {"failures": [], "episode_s": [], "other": 1}, "unexpected keyword argument .other"),
        ("num", None, "num_failed"),
    ):
        header = json.loads(data[16 : 16 + size]) | {key: value}
        if key == "num":
            del header["num_failed"]
        changed = json.dumps(header).encode()
        file.write_bytes(data[:8] + len(changed).to_bytes(8, "little") + changed + data[16 + size :])
        with pytest.raises(RunError, match=message):
            spool.get((1, 5))
