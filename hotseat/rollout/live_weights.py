"""The weights of a module while an engine serves them: named, replaced, digested, offloaded."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from hotseat.algorithms.adapters import factor_names, is_factor
from hotseat.algorithms.digest import named_digests
from hotseat.errors import WeightError


class WeightNames:
    """The weights of a model, under every name (tied ones have several), and which have arrived since `begin`.

    Of a model with adapters, factors have to arrive in every load, and the other weights only once: `keep` records that
    they are there, and `lose` that they are not any more.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        first_names: Mapping[str, str],
        factors: Mapping[str, tuple[int, ...]] | None = None,
    ):
        self.factors = factors or {}  # shapes of the adapters' factors, by name
        self.shapes = {**shapes, **self.factors}
        self.first_names = {**first_names, **{name: name for name in self.factors}}  # the first name of the same weight
        self._loaded: set[str] = set()
        self._is_base_kept = False

    @staticmethod
    def of(model: nn.Module) -> WeightNames:
        """List the weights of a model on any device, "meta" too."""
        tensors = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
        first = {id(tensor): name for name, tensor in reversed(tensors.items())}
        factors = {name: tuple(tensor.shape) for name, tensor in tensors.items() if is_factor(name)}
        return WeightNames(
            {name: tuple(tensor.shape) for name, tensor in tensors.items() if name not in factors},
            {name: first[id(tensor)] for name, tensor in tensors.items() if name not in factors},
            factors,
        )

    def with_adapters(self, layers: Iterable[str], rank: int) -> WeightNames:
        """Return the same weights with factors of this rank beside the weights of these layers."""
        factors: dict[str, tuple[int, ...]] = {}
        for layer in layers:
            out_size, in_size = self.shapes[f"{layer}.weight"]
            name_of_a, name_of_b = factor_names(f"{layer}.weight")
            factors |= {name_of_a: (rank, in_size), name_of_b: (out_size, rank)}
        return WeightNames(self.shapes, self.first_names, factors)

    def begin(self) -> None:
        self._loaded = set()

    def take(self, name: str, shape: Sequence[int]) -> None:
        """Record that a weight has arrived. Raises if it is unknown, of another shape, or came before."""
        expected = self.shapes.get(name)
        if expected is None:
            near = difflib.get_close_matches(name, self.shapes, n=1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise WeightError(f"the engine's model has no weight {name!r}{hint}")
        if expected != tuple(shape):
            raise WeightError(f"{name}: got shape {list(shape)}, the engine's is {list(expected)}")
        if name in self._loaded:
            raise WeightError(f"{name} came twice in one load")
        self._loaded.add(name)
        if name not in self.factors:
            self._is_base_kept = False  # until all of them have arrived

    def missing(self) -> list[str]:
        """List weights that are needed and have arrived under none of their names, each by its first."""
        loaded = {self.first_names[name] for name in self._loaded}
        needed = self.factors if self._is_base_kept else dict.fromkeys(self.first_names.values())
        return [name for name in needed if name not in loaded]

    def keep(self) -> None:
        """Record that a load is complete: weights without factors stay as they are."""
        self._is_base_kept = bool(self.factors)

    def lose(self) -> None:
        """Record that no weight is there any more."""
        self._is_base_kept = False


class LiveWeights:
    """The tensors of `module.state_dict()`, under every name they have (tied weights have several)."""

    def __init__(self, module: nn.Module):
        self._tensors: dict[str, Tensor] = {
            name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)
        }
        for tensor in self._tensors.values():
            storage = tensor.untyped_storage()
            # A file's or another process's memory cannot be given up: take a copy.
            if not storage.resizable() or (storage.is_shared() and not tensor.is_cuda):
                tensor.data = tensor.data.clone()
        storages = {s._cdata: s for s in (tensor.untyped_storage() for tensor in self._tensors.values())}
        self._storages = list(storages.values())
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._is_cuda = any(tensor.is_cuda for tensor in self._tensors.values())
        self._saved: Tensor | None = None  # [bytes] uint8 on the host
        self.names = WeightNames.of(module)

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages)

    def load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        with torch.no_grad():
            for name, new in named_tensors:
                self.names.take(name, new.shape)
                self._tensors[name].copy_(new)

    def digest(self, names: Collection[str] | None = None) -> dict[str, int]:
        """Hash these weights, or all."""
        first_names = {n: first for n, first in self.names.first_names.items() if names is None or n in names}
        digests = named_digests((name, self._tensors[name]) for name in dict.fromkeys(first_names.values()))
        return {name: digests[first] for name, first in first_names.items()}

    def offload(self, keep: bool) -> int:
        """Free the memory of every tensor; the tensors stay, as views of nothing. Returns the bytes copied."""
        if keep:
            total = sum(self._sizes)
            if self._saved is None or self._saved.numel() != total:
                self._saved = torch.empty(total, dtype=torch.uint8, pin_memory=self._is_cuda)
            for part, storage in zip(torch.split(self._saved, self._sizes), self._storages, strict=True):
                part.copy_(_bytes(storage), non_blocking=self._is_cuda)
            if self._is_cuda:
                torch.cuda.synchronize()
        else:
            self._saved = None
        for storage in self._storages:
            storage.resize_(0)
        if self._is_cuda:
            torch.cuda.empty_cache()
        return 0 if self._saved is None else self._saved.numel()

    def onload(self) -> int:
        """Give every tensor memory again, with the values that were saved, if any. Returns the bytes copied."""
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
        if self._saved is None:
            return 0
        for part, storage in zip(torch.split(self._saved, self._sizes), self._storages, strict=True):
            _bytes(storage).copy_(part, non_blocking=self._is_cuda)
        num_copied = self._saved.numel()
        if self._is_cuda:
            torch.cuda.synchronize()  # The pinned buffer stays, for the next time: pinning takes longer than copying.
        else:
            self._saved = None
        return num_copied


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
