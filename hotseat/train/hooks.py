"""The hooks of a training backend: everything that a new backend must fill in, in one place.

`Trainer` calls them in this order. Scoring: `_module`, then `_after_scoring` once. An update: for each micro-batch
`_before_forward`, `_module`, `_backward`; then `_gradients` for their norm, then `_step` or `_lower_loss_scale`; and at
the end always `_forget_gradients`. "All ranks together" marks a hook that contains a collective: every rank calls it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hotseat.algorithms.adapters import WeightForm
from hotseat.placement.role_names import Part
from hotseat.train.backend import TrainOptions
from hotseat.types import MicroBatch


@dataclass(frozen=True)
class Gradients:
    """One rank's summed gradients: its shard of each where gradients are sharded, otherwise all of them."""

    tensors: list[Tensor]
    is_sharded: bool  # squares of all ranks must be added up for the norm
    unit: float = 1.0  # what turns them into gradients of the loss: 1, or 1 / loss scale for example
    # The share of each one's square in the norm: 1/n where n ranks hold the same gradient; None: all count in full.
    shares: list[float] | None = None


class TrainerHooks(ABC):
    """The hooks of a backend. Abstract methods are required; methods with a body have a default that most keep."""

    name: ClassVar[str]  # as checkpoints record it
    optional_state: ClassVar[frozenset[str]] = frozenset()  # names of `_stored` that a checkpoint may lack

    @classmethod
    @abstractmethod
    def check(cls, options: TrainOptions) -> None:
        """Raise, before a model is loaded, if the options ask for something that this backend does not have."""

    # --- forward and backward -----------------------------------------------------------------------------------------

    @abstractmethod
    def _module(self) -> nn.Module:
        """Return the module to call for a forward."""

    def _model_batch(self, batch: MicroBatch) -> MicroBatch:
        """Return the micro-batch that the model runs in place of `batch`. It begins with the tokens of `batch`."""
        return batch

    @abstractmethod
    def _before_forward(self, is_last: bool) -> None:
        """Prepare the forward of a micro-batch to learn from; `is_last`: no other follows in this update."""

    @abstractmethod
    def _backward(self, total: Tensor, is_last: bool) -> None:
        """Add the gradients of the loss `total` to those of the update; `is_last`: no other follows in this update."""

    @abstractmethod
    def _after_scoring(self) -> None:
        """Clean up after forwards that no backward follows, such as weights that are still gathered."""

    @abstractmethod
    def _abandon(self) -> None:
        """Clear what a failed forward or backward has left behind, except gradients. Called on a single rank only."""

    @abstractmethod
    def _can_continue(self) -> bool:
        """Tell whether the rank can still be used after an update failed while it summed gradients."""

    # --- gradients and the optimizer step -----------------------------------------------------------------------------

    @abstractmethod
    def _gradients(self) -> Gradients:
        """Return this rank's summed gradients."""

    @abstractmethod
    def _step(self, grad_norm: float, learning_rate: float) -> None:
        """Clip the gradients by their norm and step the optimizer."""

    @abstractmethod
    def _forget_gradients(self) -> None:
        """Drop the gradients, after a step or instead of one."""

    @abstractmethod
    def _lower_loss_scale(self) -> bool:
        """Lower the loss scale after gradients that are not finite; False: there is none, or it cannot be lowered."""

    # --- tensors ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _tensors(self, part: Part) -> list[Tensor]:
        """Return the tensors of a part on the device, which offloading moves."""

    @abstractmethod
    def _shards(self) -> dict[str, Tensor]:
        """Return this rank's share of the trained weights: the tensors that are stepped, by the model's own names."""

    @abstractmethod
    def _whole(self, names: Collection[str]) -> dict[str, Tensor]:
        """Gather trained weights by the model's own names. All ranks together."""

    @abstractmethod
    def _drop(self) -> None:
        """Release everything that holds memory: the backend is being closed."""

    # --- weights in and out -------------------------------------------------------------------------------------------

    @abstractmethod
    def _stream(self, dtype: torch.dtype | None, bucket_bytes: int, form: WeightForm) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight as `Backend.weights` promises. All ranks together."""

    @abstractmethod
    def _take(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace weights as `Backend.take_weights` promises."""

    @abstractmethod
    def digest(self, *, dtype: torch.dtype | None = None) -> dict[str, int]:
        """Hash every weight as `Backend.digest` promises. All ranks together."""

    @abstractmethod
    def _base_digest(self) -> dict[str, int]:
        """Hash every weight that is not trained, as `digest` does. All ranks together."""

    # --- checkpoints --------------------------------------------------------------------------------------------------

    @abstractmethod
    def _stored(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds of this rank, by name. Live tensors, so that loading fills them in place."""

    def _restore(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Take over values from loaded state that are not live tensors, such as the loss scale."""

    @abstractmethod
    def _after_loading(self) -> None:
        """Update what derives from the stored tensors, which were just changed."""
