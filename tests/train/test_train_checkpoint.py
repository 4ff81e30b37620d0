"""Files of checkpoints, without a model."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from hotseat.errors import RunError
from hotseat.train.checkpoint import (
    CheckpointFiles,
    FrozenBase,
    check_adapters,
    check_base,
    random_states,
    read_header,
    set_random_states,
)
from hotseat.train.ranks import Ranks

CPU = torch.device("cpu")


@pytest.fixture
def files() -> CheckpointFiles:
    return CheckpointFiles("fsdp", Ranks(CPU, 10.0))


def test_what_was_written_is_read_into_the_same_tensors(files: CheckpointFiles, tmp_path: Path) -> None:
    files.write(tmp_path / "state", {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(7)}, None)
    a, b = torch.zeros(2, 3), torch.tensor(0)
    files.read(tmp_path / "state", {"a": a, "b": b})
    assert a.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert int(b) == 7
    header = read_header(tmp_path / "state")
    assert (header.num_ranks, header.base) == (1, None)


def test_optional_state_that_is_not_there_is_left_out(files: CheckpointFiles, tmp_path: Path) -> None:
    files.write(tmp_path, {"a": torch.ones(2)}, None)
    asked = {"a": torch.zeros(2), "loss_scale": torch.tensor([5.0])}
    assert set(files.read(tmp_path, asked, optional=["loss_scale"])) == {"a"}
    assert float(asked["loss_scale"]) == 5.0
    with pytest.raises(RunError, match="does not fit this model and optimizer"):
        files.read(tmp_path, asked)


def test_a_snapshot_holds_what_was_there_and_is_written_once(files: CheckpointFiles, tmp_path: Path) -> None:
    live = torch.ones(3)
    files.write_in_background(tmp_path, {"a": live}, None)
    live += 1
    with pytest.raises(RunError, match="save while the snapshot before is being written"):
        files.check_idle("save")
    while not files.is_written():
        time.sleep(0.01)
    files.check_idle("save")
    loaded = torch.zeros(3)
    files.read(tmp_path, {"a": loaded})
    assert loaded.tolist() == [1, 1, 1]


def test_the_base_of_adapters_is_recorded_and_compared(files: CheckpointFiles, tmp_path: Path) -> None:
    base = FrozenBase("llama", {"w": 3, "v": 4})
    files.write(tmp_path, {"a": torch.ones(1)}, base)
    saved = read_header(tmp_path).base
    assert saved == base
    check_adapters(tmp_path, saved, has_adapters=True)
    check_base(tmp_path, saved, base)
    with pytest.raises(RunError, match="when adapters were trained, and now all weights are"):
        check_adapters(tmp_path, saved, has_adapters=False)
    with pytest.raises(RunError, match="of llama, whose weights are not those of mistral: w differs, 2 weights"):
        check_base(tmp_path, saved, FrozenBase("mistral", {"w": 5, "v": 4, "new": 1}))


def test_a_folder_of_another_kind_or_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no state of a training backend"):
        read_header(tmp_path)
    (tmp_path / "backend.json").write_text(json.dumps({"backend": "fsdp", "format": 0, "num_ranks": 1}))
    with pytest.raises(RunError, match="saved in format 0, and this version reads format 1"):
        read_header(tmp_path)


def test_random_draws_repeat_from_their_states() -> None:
    states = random_states(CPU)
    first = torch.rand(4)
    set_random_states(states, CPU)
    assert torch.equal(torch.rand(4), first)
