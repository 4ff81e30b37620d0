"""A causal language model over a fixed number of slots, each with room in the cache for one sequence.

Two implementations with one interface. `LlamaSlots` runs the layers of Llama-like models itself; `AnySlots` calls the
forward of whatever `AutoModelForCausalLM` gave. Both read the live parameters of the module. `_slot_cache` says why a
row's result does not depend on the rows beside it.
"""

from __future__ import annotations

import torch
from torch import nn

from hotseat.rollout.any_slots import AnySlots, check_config
from hotseat.rollout.llama_slots import LlamaSlots, is_llama_like
from hotseat.rollout.slot_cache import Prefix, SlotModel, padded

__all__ = ["AnySlots", "LlamaSlots", "Prefix", "SlotModel", "check_config", "padded", "slot_model"]


@torch.no_grad()
def slot_model(
    model: nn.Module,
    num_slots: int,
    max_length: int,
    device: torch.device,
    own_layers: bool,
    fp32_head: bool = True,
) -> SlotModel:
    """Return the fast implementation if it fits the model and `own_layers` allows it, otherwise the general one."""
    if own_layers and is_llama_like(model, max_length):
        return LlamaSlots(model, num_slots, max_length, device, fp32_head)
    return AnySlots(model, num_slots, max_length, device, fp32_head)
