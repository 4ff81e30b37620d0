"""Files of checkpoints, without a model."""

from __future__ import annotations

import io
import json
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pickles import Bomb

from hotseat.errors import RunError
from hotseat.train.checkpoint_files import (
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
    (tmp_path / "backend.json").write_bytes(b"\x80")
    with pytest.raises(RunError, match="backend.json is not JSON: 'utf-8' codec"):
        read_header(tmp_path)
    (tmp_path / "backend.json").write_text(json.dumps({"backend": "fsdp", "format": 0, "num_ranks": 1}))
    with pytest.raises(RunError, match="saved in format 0, and this version reads format 2"):
        read_header(tmp_path)


def test_random_draws_repeat_from_their_states() -> None:
    states = random_states(CPU)
    first = torch.rand(4)
    set_random_states(states, CPU)
    assert torch.equal(torch.rand(4), first)


# --- files that somebody forged -----------------------------------------------------------------------------------


def forged(metadata: dict[str, Any], directory: Path) -> CheckpointFiles:
    (directory / "metadata.json").write_text(json.dumps(metadata))
    return CheckpointFiles("fsdp", Ranks(CPU, 10.0))


def test_no_file_of_a_checkpoint_is_unpickled(files: CheckpointFiles, tmp_path: Path) -> None:
    """Scenario 63: pickles where torch has metadata and where tensors are, bare and as torch saves objects."""
    folder, bomb = tmp_path / "state", Bomb(tmp_path / "went off")
    files.write(folder, {"a": torch.ones(2)}, None)
    (folder / ".metadata").write_bytes(pickle.dumps(bomb))
    (folder / "__0.metadata").write_bytes(pickle.dumps(bomb))
    found = torch.zeros(2)
    files.read(folder, {"a": found})
    assert found.tolist() == [1, 1]
    saved = io.BytesIO()
    torch.save(bomb, saved)
    metadata = json.loads((folder / "metadata.json").read_text())
    for data in (pickle.dumps(bomb, protocol=2), saved.getvalue()):
        (folder / "__0_0.distcp").write_bytes(data)
        metadata["tensors"]["a"]["chunks"][0]["bytes"] = len(data)
        with pytest.raises(RunError, match="does not fit this model and optimizer"):
            forged(metadata, folder).read(folder, {"a": found})
    assert not (tmp_path / "went off").exists()
    with pytest.raises(pickle.UnpicklingError):
        torch.load(folder / "__0_0.distcp", weights_only=True)
    torch.load(folder / "__0_0.distcp", weights_only=False)
    assert (tmp_path / "went off").exists()  # it was a bomb


def test_every_kind_of_tensor_keeps_its_place_and_type_in_the_metadata(files: CheckpointFiles, tmp_path: Path) -> None:
    state = {
        "bf16": torch.ones(2, 3, dtype=torch.bfloat16),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "number": torch.tensor(7),
        "none": torch.zeros(0, 4),
    }
    files.write(tmp_path, state, None)
    tensors = json.loads((tmp_path / "metadata.json").read_text())["tensors"]
    assert {name: (facts["dtype"], facts["shape"]) for name, facts in tensors.items()} == {
        "bf16": ("torch.bfloat16", [2, 3]),
        "bytes": ("torch.uint8", [5]),
        "number": ("torch.int64", []),
        "none": ("torch.float32", [0, 4]),
    }
    assert {chunk["file"] for facts in tensors.values() for chunk in facts["chunks"]} == {"__0_0.distcp"}
    loaded = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    files.read(tmp_path, loaded)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert not (tmp_path / ".metadata").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "torch.load"}, "torch.load"),
        ({"shape": [-1]}, "-1 is not a whole number"),
        ({"shape": [True]}, "True is not a whole number"),
        ({"chunks": [{"offsets": [0], "sizes": [2], "file": "../a.distcp", "begin": 0, "bytes": 9}]}, "'../a.distcp'"),
        ({"chunks": [{"offsets": [0], "sizes": [2], "file": "/a.distcp", "begin": 0, "bytes": 9}]}, "'/a.distcp'"),
        ({"chunks": None}, "NoneType"),
    ],
)
def test_metadata_that_name_other_files_or_no_tensors_are_refused(
    files: CheckpointFiles, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    files.write(tmp_path, {"a": torch.ones(2)}, None)
    metadata = json.loads((tmp_path / "metadata.json").read_text())
    metadata["tensors"]["a"] |= change
    with pytest.raises(RunError, match=f"metadata.json cannot be read as the metadata of a checkpoint: .*{message}"):
        forged(metadata, tmp_path).read(tmp_path, {"a": torch.zeros(2)})
    (tmp_path / "metadata.json").unlink()
    with pytest.raises(RunError, match="metadata.json cannot be read as the metadata of a checkpoint: FileNotFound"):
        files.read(tmp_path, {"a": torch.zeros(2)})
