"""Metadata of a checkpoint as JSON: which tensors it holds, and which bytes of which file hold each part of them.

torch writes this as a pickle, and reading a pickle may run code. Here it is a JSON file with tensors only, so nothing
makes torch unpickle a value that is not a tensor either. Tensors themselves stay in torch's files, which torch reads
with `weights_only`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from hotseat.errors import RunError

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
