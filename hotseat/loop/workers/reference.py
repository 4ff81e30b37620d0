"""References of preference optimisation, in the process of each rank that learns: another model, or the model itself
with its adapters switched off.

Their log-probs can be kept on disk, in a file whose name is a digest of the pairs and of the reference's files: a later
run on the same pairs reads them, and loads no reference.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hotseat.cluster.activity import activity
from hotseat.data import Pair, digest_of
from hotseat.errors import UserError
from hotseat.loop.devices.held_memory import device_of_process, release_cache_here
from hotseat.loop.workers.preferences import ScoredPair
from hotseat.model_source import ModelSource
from hotseat.placement.role_names import Part
from hotseat.train.backend import Backend, TrainOptions
from hotseat.train.make import make_backend
from hotseat.types import MicroBatch

_FORMAT = 1  # of the files; a change of what is computed raises it
_WEIGHT_FILES = ("*.safetensors", "*.bin")
_TENSOR = "log_probs"


@dataclass(frozen=True)
class ReferenceSettings:
    """A rank's reference.

    model: its checkpoint. options: None if the policy without its adapters is the reference. dtype: of the computation.
    is_offloaded: its weights are on the device only while it scores. folder: where its log-probs of all pairs are kept;
    None: pairs are scored when they are learned from.
    """

    model: ModelSource
    options: TrainOptions | None
    dtype: str
    is_offloaded: bool = False
    folder: str | None = None


@dataclass(frozen=True)
class Reference:
    """Model that scores what another one learns from.

    is_policy: the backend is that of the model that learns, which scores with its adapters switched off. is_offloaded:
    its weights are off the device between uses.
    """

    backend: Backend
    is_policy: bool
    is_offloaded: bool = False

    def log_probs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-prob of each token of each micro-batch, [num_tokens] each. Collective: all ranks call it."""
        with self.backend.without_adapters() if self.is_policy else self._on_device():
            return self.backend.log_probs(batches, 1.0)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        if not self.is_offloaded:
            yield
            return
        self.backend.onload([Part.WEIGHTS])
        try:
            yield
        finally:
            self.backend.offload([Part.WEIGHTS])

    def close(self) -> None:
        """Free the memory that only the reference uses."""
        if not self.is_policy:
            self.backend.close()
            release_cache_here()


def load_reference(settings: ReferenceSettings, policy: Backend) -> Reference:
    if settings.options is None:
        return Reference(policy, is_policy=True)
    with activity.doing("loads the reference model"):
        backend = make_backend(settings.model, settings.options, device=device_of_process())
    if settings.is_offloaded:
        backend.offload([Part.WEIGHTS])
    return Reference(backend, is_policy=False, is_offloaded=settings.is_offloaded)


# --- log-probs on disk ------------------------------------------------------------------------------------------------


def reference_file(settings: ReferenceSettings, pairs: Sequence[Pair]) -> Path:
    """Return the file for a reference's log-probs of these pairs; its name is a digest of both."""
    assert settings.folder is not None
    facts = {
        "format": _FORMAT,
        "pairs": digest_of(pairs),
        "model": digest_of_model(settings.model.name),
        "dtype": settings.dtype,
    }
    name = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()
    return Path(settings.folder) / f"{name}.safetensors"


def read_scores(path: Path, num_pairs: int) -> list[tuple[float, float]] | None:
    """Return a reference's log-probs of the answers of each pair; None if the file is not there, or damaged."""
    try:
        scores = load_file(path)[_TENSOR]
    except (OSError, SafetensorError, KeyError):
        return None
    if scores.shape != (num_pairs, 2) or not scores.isfinite().all():
        return None
    return [(chosen, rejected) for chosen, rejected in scores.tolist()]


def write_scores(path: Path, scores: Sequence[tuple[float, float]]) -> None:
    """Write a reference's log-probs, so that the file exists only if it is complete."""
    writing = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({_TENSOR: torch.tensor(scores, dtype=torch.float64)}, writing)
        writing.replace(path)
    except OSError as error:
        raise UserError(
            f"algorithm.dpo.precompute: {path} cannot be written: {error.strerror or error}; choose another run_dir, or"
            " set algorithm.dpo.precompute to false"
        ) from error


def scored_pairs(pairs: Sequence[Pair], scores: Sequence[tuple[float, float]]) -> list[ScoredPair]:
    """Return the pairs with the reference's log-probs of their answers."""
    return [
        ScoredPair(pair.chosen, pair.rejected, pair.margin, score) for pair, score in zip(pairs, scores, strict=True)
    ]


def digest_of_model(model: str) -> str:
    """Compute a digest of a checkpoint's config and weights, from the bytes of its files."""
    folder, digest = _folder_of(model), hashlib.blake2b(digest_size=16)
    weights = sorted(file for pattern in _WEIGHT_FILES for file in folder.glob(pattern))
    for file in (folder / "config.json", *weights):
        with file.open("rb") as content:
            digest.update(f"{file.name} {hashlib.file_digest(content, 'sha256').hexdigest()} ".encode())
    return digest.hexdigest()


def _folder_of(model: str) -> Path:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    patterns: Any = ["config.json", *_WEIGHT_FILES]
    return Path(snapshot_download(model, allow_patterns=patterns))
