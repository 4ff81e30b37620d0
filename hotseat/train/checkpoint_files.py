"""Files of a backend's checkpoint: written by all ranks at once or in the background, read by any number of ranks.

The format is the same for every backend: each weight and its optimizer state, whole, by name.

Metadata say which tensors there are, and which bytes of which file hold each part of them. torch writes them as a
pickle, and reading a pickle may run code. Here they are JSON, with tensors only, so nothing makes torch unpickle a
value that is not a tensor either. Tensors stay in torch's files, which torch reads with `weights_only`.
"""

from __future__ import annotations

import json
import re
import threading
import warnings
from collections.abc import Collection, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from hotseat import faults
from hotseat.errors import RunError
from hotseat.files import write_whole
from hotseat.train.ranks import Ranks

FORMAT = 2  # in the first, metadata were a pickle
_LAST_WRITE_S = 5.0  # for a snapshot that is being written when the backend is closed


@dataclass(frozen=True)
class FrozenBase:
    """The model that adapters were trained on: its name, and the digests of its weights that are not trained."""

    model: str
    digests: Mapping[str, int]


@dataclass(frozen=True)
class Header:
    """The facts in a checkpoint's `backend.json`."""

    num_ranks: int
    base: FrozenBase | None  # None: all weights were trained


class CheckpointFiles:
    """Writes and reads this rank's share of checkpoints; at most one is being written at a time."""

    def __init__(self, backend: str, ranks: Ranks):
        self._backend = backend
        self._ranks = ranks
        self._writing: Future[None] | None = None  # of a snapshot

    def write(self, directory: Path, state: dict[str, Tensor], base: FrozenBase | None) -> None:
        """Put the state of all ranks on disk. All ranks together, perhaps each in a thread of its own."""
        if self._ranks.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            header: dict[str, Any] = {"backend": self._backend, "format": FORMAT, "num_ranks": self._ranks.size}
            if base is not None:
                header["base"] = asdict(base)
            (directory / "backend.json").write_text(json.dumps(header) + "\n")
        self._ranks.wait_to_save("create the folder of a checkpoint")
        faults.reach("save.during")
        _silence_single_rank_warning()
        writer = MetadataWriter(directory)
        dcp.save(state, storage_writer=writer, process_group=self._ranks.saving, no_dist=self._ranks.size == 1)
        self._list_files(directory)

    def _list_files(self, directory: Path) -> None:
        """Write the list of this rank's files, by which the commit of the checkpoint sees that all of them arrived."""
        paths = [*directory.glob(f"__{self._ranks.rank}_*")]  # as torch names them
        if self._ranks.rank == 0:
            paths += [path for path in directory.iterdir() if not path.name.startswith(("__", "rank-", ".rank-"))]
        files = {path.name: path.stat().st_size for path in paths}
        write_whole(directory / f"rank-{self._ranks.rank}.json", json.dumps(files) + "\n")

    def write_in_background(self, directory: Path, state: dict[str, Tensor], base: FrozenBase | None) -> None:
        """Copy the state to host memory and let a thread write the copy. All ranks together."""
        copied = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
        writing: Future[None] = Future()

        def write() -> None:
            try:
                self.write(directory, copied, base)
            except BaseException as error:  # torch's own is no `Exception`
                writing.set_exception(error)
            else:
                writing.set_result(None)
            finally:
                copied.clear()  # so that a future that is kept does not keep the memory

        self._writing = writing
        # A daemon thread, not a pool: at its end the interpreter would wait for a pool's threads, and a disk may hang.
        threading.Thread(target=write, name="checkpoint", daemon=True).start()

    def check_idle(self, what: str) -> None:
        """Raise if a snapshot is still being written, or its outcome was not asked for."""
        if self._writing is not None:
            raise RunError(f"{what} while the snapshot before is being written: wait until `is_written` says it is")

    def is_written(self) -> bool:
        """Tell whether the last snapshot is on disk. Raises why it is not, once."""
        if self._writing is None:
            return True
        if not self._writing.done():
            return False
        writing, self._writing = self._writing, None
        writing.result()
        return True

    def close(self) -> None:
        """Wait a few seconds for a snapshot that is being written: its folder may be removed next."""
        if self._writing is not None:
            wait([self._writing], timeout=_LAST_WRITE_S)

    def read(self, directory: Path, state: dict[str, Tensor], optional: Collection[str] = ()) -> dict[str, Tensor]:
        """Fill the tensors of `state` from disk and return them, without `optional` ones that are not there.

        All ranks together.
        """
        reader = MetadataReader(directory)
        state = {name: tensor for name, tensor in state.items() if name not in optional or name in reader.names}
        _silence_single_rank_warning()
        try:
            dcp.load(state, storage_reader=reader, process_group=self._ranks.saving, no_dist=self._ranks.size == 1)
        except CheckpointException as error:
            reasons = "; ".join(f"rank {rank}: {reason}" for rank, (reason, _) in error.failures.items())
            raise RunError(f"{directory} does not fit this model and optimizer: {reasons}") from error
        return state


def read_header(directory: Path) -> Header:
    """Read the facts about a checkpoint; raise if it is none, or of another format."""
    try:
        header: dict[str, Any] = json.loads((directory / "backend.json").read_text())
    except FileNotFoundError:
        raise RunError(f"{directory} holds no state of a training backend: it has no backend.json") from None
    except ValueError as error:
        raise RunError(f"{directory}/backend.json is not JSON: {error}") from None
    if header.get("format") != FORMAT:
        raise RunError(
            f"{directory} was saved in format {header.get('format')}, and this version reads format {FORMAT}: resume"
            " with the version of Hotseat that wrote it"
        )
    base = header.get("base")
    return Header(header["num_ranks"], None if base is None else FrozenBase(base["model"], base["digests"]))


def check_adapters(directory: Path, saved: FrozenBase | None, *, has_adapters: bool) -> None:
    """Raise if adapters were trained then and are not now, or the other way round."""
    if (saved is not None) != has_adapters:
        had, has = ("adapters", "all weights") if saved is not None else ("all weights", "adapters")
        raise RunError(f"{directory} was saved when {had} were trained, and now {has} are: set LoRA as it was then")


def check_base(directory: Path, saved: FrozenBase, current: FrozenBase) -> None:
    """Raise unless the adapters of a checkpoint belong to the current model: on another they are useless."""
    names = {**current.digests, **saved.digests}
    other = [name for name in names if current.digests.get(name) != saved.digests.get(name)]
    if other:
        raise RunError(
            f"{directory} holds adapters of {saved.model or 'a model'}, whose weights are not"
            f" those of {current.model or 'the current model'}: {other[0]} differs, {len(other)} weights in all;"
            " resume with the model that they were trained on"
        )


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's random generators, of the host and of a CUDA device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Undo random draws since `random_states`. States that are missing stay as they are."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _silence_single_rank_warning() -> None:
    """Silence torch's warning that a single rank saves without a process group, which is intended.

    The filter stays: `catch_warnings` changes what every thread sees, and several threads may run.
    """
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


# --- metadata ---------------------------------------------------------------------------------------------------------


METADATA = "metadata.json"
_FILE = re.compile(r"\w+\.distcp")  # of tensors, in the same folder
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


@dataclass(frozen=True)
class _Place:
    """Place of a stored part of a tensor. Attributes are named as torch's reader asks for them."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class MetadataWriter(dcp.FileSystemWriter):
    """Writes tensors as torch does, and their metadata as JSON."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata. Called on one rank, when all ranks have written their tensors."""
        places = {result.index: result.storage_data for each in results for result in each}
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), f"{name} is not a tensor"
            tensors[name] = {
                "dtype": str(tensor.properties.dtype),
                "shape": list(tensor.size),
                "chunks": [_chunk_facts(chunk, places[MetadataIndex(name, chunk.offsets)]) for chunk in tensor.chunks],
            }
        (Path(self.path) / METADATA).write_text(json.dumps({"tensors": tensors}) + "\n")


class MetadataReader(dcp.FileSystemReader):
    """Reads what `MetadataWriter` wrote. names: those of the tensors."""

    def __init__(self, directory: Path):
        """Read the metadata. Raises `RunError` if there is none, or it is not of the form that is written here."""
        super().__init__(directory)
        path = directory / METADATA
        try:
            self._metadata = _parsed(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise RunError(f"{path} cannot be read as the metadata of a checkpoint: {reason}") from None
        self.names = self._metadata.state_dict_metadata.keys()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, which is the same for every rank."""
        return self._metadata


def _chunk_facts(chunk: ChunkStorageMetadata, place: Any) -> dict[str, Any]:
    return {
        "offsets": list(chunk.offsets),
        "sizes": list(chunk.sizes),
        "file": place.relative_path,
        "begin": place.offset,
        "bytes": place.length,
    }


def _parsed(stored: Mapping[str, Any]) -> Metadata:
    tensors: dict[str, Any] = {}
    places = {}
    for name, facts in stored["tensors"].items():
        chunks = []
        for each in facts["chunks"]:
            chunk = ChunkStorageMetadata(_size(each["offsets"]), _size(each["sizes"]))
            if not _FILE.fullmatch(each["file"]):
                raise ValueError(f"{each['file']!r} is not the name of a file with tensors")
            place = _Place(each["file"], _count(each["begin"]), _count(each["bytes"]))
            chunks.append(chunk)
            places[MetadataIndex(name, chunk.offsets)] = place
        properties = TensorProperties(dtype=_DTYPES[facts["dtype"]])
        tensors[name] = TensorStorageMetadata(properties, _size(facts["shape"]), chunks)
    return Metadata(tensors, storage_data=places)


def _size(values: list[Any]) -> torch.Size:
    return torch.Size([_count(value) for value in values])


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a whole number from 0 on")
    return value
