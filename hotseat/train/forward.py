"""A forward from a flat micro-batch to flat outputs, whatever layout the model runs in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hotseat.train.backend import Outputs
from hotseat.train.divergence import TEACHER_FIELDS, Teaching
from hotseat.train.experts import balancing_loss
from hotseat.train.packing import LayoutKind, join, model_input
from hotseat.train.sequence import SequenceGroup
from hotseat.types import MicroBatch
from hotseat.vision import Vision


@dataclass
class ForwardPass:
    """Lays micro-batches out for the model, runs it, and lays its outputs flat again."""

    layout: LayoutKind
    has_flash: bool
    device: torch.device
    sequence: SequenceGroup
    dropouts: Sequence[nn.Module] = ()  # in front of adapters; all others are off for good
    vision: Vision | None = None  # of a VLM
    num_before: int | None = None  # see `Blocks.of`
    replays_routing: bool = False  # see `algorithms.routing`
    filler: MicroBatch | None = None  # for micro-batches without images, where other ranks may have some

    def set_dropout(self, is_on: bool) -> None:
        for dropout in self.dropouts:
            dropout.train(is_on)

    def run(
        self,
        module: nn.Module,
        model_batch: MicroBatch,
        num_tokens: int,
        temperature: float,
        with_entropy: bool,
        with_routing: bool,
        teaching: Teaching | None = None,
    ) -> Outputs:
        """Run `module` on `model_batch` and return the outputs of its first `num_tokens` tokens."""
        has_filler = self.filler is not None and not model_batch.images
        if self.filler is not None and has_filler:
            model_batch = join(_with_one_filler(model_batch, self.filler))
        inputs = model_input(
            model_batch,
            self.layout,
            device=self.device,
            has_flash=self.has_flash,
            group=self.sequence,
            with_counts=with_routing,
            vision=self.vision,
            teaching=teaching,
            num_before=self.num_before,
            with_routing=self.replays_routing,
        )
        outputs: dict[str, Tensor] = module(inputs, temperature, with_entropy)
        routing = outputs.pop("routing", None)
        aux_loss = None if routing is None else balancing_loss(self.sequence.add_up(routing))

        def flat(values: Tensor) -> Tensor:
            mine = values.new_zeros((model_batch.num_tokens, *values.shape[1:])).index_copy(0, inputs.tokens, values)
            whole = self.sequence.add_up(mine)
            if has_filler:  # its gradient is zero, but goes all the way to the visual encoder
                return whole[:num_tokens] + 0.0 * whole[num_tokens:].sum()
            return whole[:num_tokens]

        return Outputs(**{name: flat(values) for name, values in outputs.items()}, aux_loss=aux_loss)


def _with_one_filler(batch: MicroBatch, filler: MicroBatch) -> list[MicroBatch]:
    """Return both, with the fields that the forward reads: those of a teacher, which are zeros in the filler."""
    fields = {name: values for name, values in batch.fields.items() if name in TEACHER_FIELDS}
    zeros = {name: values.new_zeros((filler.num_tokens, *values.shape[1:])) for name, values in fields.items()}
    return [replace(batch, fields=fields), replace(filler, fields=zeros)]
