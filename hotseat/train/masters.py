"""32-bit weights that an optimizer steps, beside the 16-bit copies that a model on a single rank computes with.

Where there is nothing to shard, this does what FSDP's mixed precision does, and gives the same bits: gradients are
computed in 16 bits and summed over micro-batches in 32. There are no hooks around layers, and weights are converted
once per step instead of in every forward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hotseat.placement.memory_terms import COPIED_PARAMETERS
from hotseat.train.offload import reserve

COPIED_BYTES = COPIED_PARAMETERS * 2
_PENDING_BYTES = 64 << 20  # of 16-bit gradients, before they are added to the sums together


class Masters:
    """The 32-bit weights of a model. From now on its parameters are 16-bit copies of them.

    weights: by the model's names, with `grad`, the sum of the gradients of all backwards since it was last cleared.
    """

    def __init__(self, model: nn.Module):
        self.weights: dict[str, nn.Parameter] = {}
        self._copies: dict[str, nn.Parameter] = {}
        self._pending: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._pending_bytes = 0
        for name, copy in model.named_parameters():
            if copy.dtype != torch.float32:
                continue
            master = nn.Parameter(copy.data, requires_grad=copy.requires_grad)
            copy.data = copy.data.to(torch.bfloat16)
            self.weights[name], self._copies[name] = master, copy
            if copy.requires_grad:
                copy.register_post_accumulate_grad_hook(self._hook(master))

    def _hook(self, master: nn.Parameter) -> Callable[[Tensor], None]:
        def collect(copy: Tensor) -> None:
            assert isinstance(copy, nn.Parameter)
            assert copy.grad is not None
            self._pending.append((master, copy))
            self._pending_bytes += copy.grad.nbytes
            if self._pending_bytes >= _PENDING_BYTES:
                self.add_up()

        return collect

    @torch.no_grad()
    def add_up(self) -> None:
        """Add the 16-bit gradients to the sums, and free them."""
        gradients = [copy.grad for _, copy in self._pending if copy.grad is not None]
        exact = [torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients]
        if exact:
            torch._foreach_copy_(exact, gradients)
        sums: list[Tensor] = []
        summands: list[Tensor] = []
        for (master, copy), gradient in zip(self._pending, exact, strict=True):
            copy.grad = None
            if master.grad is None:
                master.grad = gradient
            else:
                sums.append(master.grad)
                summands.append(gradient)
        if sums:
            torch._foreach_add_(sums, summands)
        self._pending, self._pending_bytes = [], 0

    def forget_gradients(self) -> None:
        """Clear 16-bit gradients that were not added up, because a backward failed."""
        for copy in self._copies.values():
            copy.grad = None
        self._pending, self._pending_bytes = [], 0

    @torch.no_grad()
    def update_copies(self) -> None:
        """Make the copies equal to the weights, rounded. To be called whenever weights have changed."""
        torch._foreach_copy_([copy.data for copy in self._copies.values()], list(self.weights.values()))

    def drop_copies(self) -> int:
        """Free the memory of the copies, and return its bytes."""
        storages = [copy.untyped_storage() for copy in self._copies.values()]
        num_bytes = sum(storage.nbytes() for storage in storages)
        for storage in storages:
            storage.resize_(0)
        return num_bytes

    def make_copies(self) -> int:
        """Make copies again that were dropped, and return the bytes that they take."""
        dropped = [copy for copy in self._copies.values() if copy.untyped_storage().nbytes() == 0]
        sizes = [copy.numel() * copy.element_size() for copy in dropped]
        if dropped:
            reserve(dropped[0].device, sizes)
        for copy, num_bytes in zip(dropped, sizes, strict=True):
            copy.untyped_storage().resize_(num_bytes)
        self.update_copies()
        return sum(sizes)
