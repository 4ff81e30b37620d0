"""Low-rank adapters (Hu et al., "LoRA", 2021), which PEFT puts beside a model's linear layers.

A layer of weight W [out, in] gets A [rank, in] and B [out, rank] and computes W x + s B A x, s = alpha / rank. Only A
and B are trained, and the head of a value model, which may be new. W never changes: what leaves the trainer for engines
and exports is W + s B A under W's own name, made weight by weight on the way out.

PEFT is imported where it is used: most runs have no adapters.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hotseat.errors import UserError
from hotseat.model_source import ModelSource
from hotseat.train.backend import Head, LoraOptions
from hotseat.vision import language_part, policy_class, value_class

ALL_LINEAR = "all-linear"
_NAME = "default"  # PEFT's, of the only adapter
_LINEAR = (nn.Linear, Conv1D)


@dataclass(frozen=True)
class Adapter:
    """The adapter beside one weight. `a` and `b` are the model's names of its two factors."""

    a: str
    b: str
    scale: float
    is_transposed: bool  # the weight is [in, out], as GPT-2 has it

    def merge(self, rows: Tensor, first_row: int, a: Tensor, b: Tensor) -> Tensor:
        """Compute rows of W + s B A in 32 bits, from those of W.

        The product is always of the whole factors: one of fewer rows may be rounded otherwise, and the same adapter
        would have another digest on another number of ranks. Scaled and added in two steps for the same reason: a
        fused one is not used for every element.
        """
        product = (b.float() @ a.float()).mul_(self.scale)
        if self.is_transposed:
            product = product.T
        return rows.float() + product[first_row : first_row + rows.shape[0]]


def add_adapters(model: PreTrainedModel, options: LoraOptions, head: Head) -> None:
    """Add adapters to linear layers, in place, and freeze all else but a value model's head.

    B starts at zero, so the model computes what it did. A is drawn from the seed: the same in every process.
    """
    from peft import LoraConfig, inject_adapter_in_model

    names = find_targets(model, options.target_modules)
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=names,
        task_type="CAUSAL_LM" if head == "policy" else "SEQ_CLS",
        fan_in_fan_out=isinstance(model.get_submodule(names[0]), Conv1D),
    )
    with torch.random.fork_rng(devices=[]), _of_no_known_type(model):
        torch.manual_seed(options.seed)
        inject_adapter_in_model(config, model, _NAME)
    assert find_adapters(model).keys() == {f"{name}.weight" for name in names}
    for name, weight in model.named_parameters():
        if _is_adapter(name):
            weight.data = weight.data.to(model.dtype)  # PEFT's choice beside a base in NF4 is 32 bits
        weight.requires_grad_(_is_adapter(name) or (head == "value" and name.startswith(f"{_head_name(model)}.")))


@contextmanager
def _of_no_known_type(model: PreTrainedModel) -> Iterator[None]:
    """Keep PEFT from knowing what model this is.

    It takes linear layers of some mixtures, by their names, for experts of older checkpoints (the shared experts of
    DeepSeek-V3), and puts adapters elsewhere.
    """
    known = model.config.model_type
    model.config.model_type = "unknown"
    try:
        yield
    finally:
        model.config.model_type = known


def find_targets(model: PreTrainedModel, targets: Sequence[str] | str) -> list[str]:
    """List the layers that the targets name: by ends of names, a pattern for whole names, or "all-linear"."""
    modules = {name: module for name, module in model.named_modules() if name}
    linear = [name for name, module in modules.items() if isinstance(module, _LINEAR) and name != _head_name(model)]
    if targets == ALL_LINEAR and linear:
        return linear
    if isinstance(targets, str):
        matches_of = {targets: [name for name in modules if _pattern(targets).fullmatch(name)]}
    else:
        matches_of = {target: [name for name in modules if f".{name}".endswith(f".{target}")] for target in targets}
    have = f"{type(model).__name__} has {', '.join(sorted({name.rpartition('.')[2] for name in linear}))}"
    unmatched = [target for target, names in matches_of.items() if not names]
    if unmatched or not matches_of:
        hint = "; a single word is a pattern for whole names: write a list" if isinstance(targets, str) else ""
        raise UserError(
            f"train.lora.target_modules: no layer is called {' or '.join(unmatched) or 'nothing'}; {have}{hint}"
        )
    names = list(dict.fromkeys(name for matches in matches_of.values() for name in matches))
    other = [name for name in names if name not in linear]
    if other:
        raise UserError(
            f"train.lora.target_modules: {other[0]} ({type(modules[other[0]]).__name__}) cannot have an adapter: only"
            f" linear layers below the head can; {have}"
        )
    return names


def check_targets(source: ModelSource, targets: Sequence[str] | str, head: Head) -> None:
    """Raise as `find_targets` does, without loading the model's weights."""
    if targets != ALL_LINEAR:
        target_layers(source, targets, head)


def check_language_targets(source: ModelSource, targets: Sequence[str] | str) -> None:
    """Raise if vLLM cannot apply adapters of these layers to a VLM.

    It can if all of them are in the language model, and if it holds every weight below them.
    """
    model = _empty_model(source, "policy")
    if model.config.model_type == "llava":
        raise UserError(
            "vLLM leaves out layers of LLaVA's visual encoder, and so cannot hold all weights that adapters are applied"
            " beside (rollout.lora_sync is adapter): set rollout.lora_sync to merged"
        )
    language = language_part(model)
    inside = {id(module) for module in language.modules()}
    outside = [name for name in find_targets(model, targets) if id(model.get_submodule(name)) not in inside]
    if outside:
        part = next(name for name, module in model.named_modules() if module is language).rpartition(".")[2]
        raise UserError(
            f"train.lora.target_modules: {outside[0]} is one of {len(outside)} layers outside of the language model,"
            " and vLLM applies adapters to that alone (rollout.lora_sync is adapter): set target_modules to a pattern"
            f" such as .*{part}.*_proj, or rollout.lora_sync to merged"
        )


def target_layers(source: ModelSource, targets: Sequence[str] | str, head: Head = "policy") -> list[str]:
    """List the layers of a model that `find_targets` would find, without loading its weights."""
    return find_targets(_empty_model(source, head), targets)


def _empty_model(source: ModelSource, head: Head) -> PreTrainedModel:
    """Make a model without memory for its weights."""
    config = source.config()
    kind = policy_class(config) if head == "policy" else value_class(config)
    with torch.device("meta"):
        return kind.from_config(config, **source.arguments)


def find_adapters(model: nn.Module) -> dict[str, Adapter]:
    """Find the adapters of a model, by the name that their weight has without them."""
    from peft.tuners.lora import LoraLayer

    return {
        f"{name}.weight": Adapter(
            f"{name}.lora_A.{_NAME}.weight",
            f"{name}.lora_B.{_NAME}.weight",
            module.scaling[_NAME],
            module.fan_in_fan_out,
        )
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


def base_names(names: Sequence[str]) -> dict[str, str]:
    """Map each of the model's names that is not an adapter's to the name without adapters."""
    return {name: name.replace(".base_layer.", ".") for name in names if not _is_adapter(name)}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Switch all adapters off inside the context: each layer computes W x alone.

    PEFT's own `enable_adapters` also changes which weights have gradients, on which sharding depends.
    """
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def dropouts(model: nn.Module) -> list[nn.Module]:
    """List the dropouts in front of adapters."""
    from peft.tuners.lora import LoraLayer

    return [module.lora_dropout for module in model.modules() if isinstance(module, LoraLayer)]


def save_adapter(directory: Path, model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Save trained weights, by the model's names, in PEFT's format: for `PeftModel.from_pretrained` on the base."""
    config = copy.copy(model.peft_config[_NAME])
    config.inference_mode = True
    config.base_model_name_or_path = model.name_or_path
    # Set only now: had PEFT known from the start, it would have put a copy of the head beside it.
    config.modules_to_save = sorted({name.partition(".")[0] for name in weights if not _is_adapter(name)}) or None
    config.save_pretrained(directory)
    named = {f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": tensor for name, tensor in weights.items()}
    save_file(named, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise UserError(f"train.lora.target_modules: {text!r} is no pattern ({error}): write a list of names") from None


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _head_name(model: PreTrainedModel) -> str:
    """Return the name of the module behind the body."""
    output = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if output is not None and module is output), "score")
