"""`hotseat merge-lora`: adds a LoRA adapter to the weights of its base model, and writes a plain model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hotseat.errors import UserError
from hotseat.observe.noise import without_deepspeeds_greeting

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def base_of(adapter: Path, base: str | None, output: Path) -> str:
    """Return the base model of an adapter: the one that is given, or the one that its config names.

    Raises if the adapter cannot be merged, or the output cannot be written, as far as files show. Loads no library.
    """
    if not (adapter / CONFIG).is_file():
        raise UserError(f"{adapter} is no adapter: there is no {CONFIG} in it")
    if not (adapter / WEIGHTS).is_file():
        raise UserError(f"{adapter} has no {WEIGHTS}: adapters in other formats contain pickles, which are not loaded")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} exists: choose a folder that is new or empty")
    named = base or json.loads((adapter / CONFIG).read_text()).get("base_model_name_or_path")
    if not named:
        raise UserError(f"{adapter / CONFIG} names no base model: give --base MODEL")
    if Path(named).is_dir() and not (Path(named) / "config.json").is_file():
        raise UserError(f"{named} is no checkpoint: there is no config.json in it")
    if not Path(named).is_dir() and (named.startswith(("/", ".", "~")) or named.count("/") > 1):
        raise UserError(f"there is no folder {named}, the base model of {adapter}: give --base MODEL")
    return str(named)


def merge(base: str, adapter: Path, output: Path, *, is_reward_model: bool = False, bf16: bool = False) -> int:
    """Write the base model with the adapter added to its weights; return the number of layers that changed."""
    import torch
    from peft import PeftModel
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import logging

    from hotseat.vision import copy_processor, policy_class, sees_images, value_class

    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(base, **({"num_labels": 1} if is_reward_model else {}))
        tokenizer = AutoTokenizer.from_pretrained(base)
    except (OSError, ValueError) as error:
        raise UserError(f"base model {base!r}: {error}") from None
    kind = value_class(config) if is_reward_model else policy_class(config)
    with torch.device("meta"):
        shapes = {name: tuple(each.shape) for name, each in kind.from_config(config).named_parameters()}
    num_layers = _check_fit(adapter, base, shapes)
    model = kind.from_pretrained(base, config=config, dtype=torch.bfloat16 if bf16 else "auto", use_safetensors=True)
    merged: Any = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    with without_deepspeeds_greeting():
        merged.save_pretrained(output)
    tokenizer.save_pretrained(output)
    if sees_images(config):
        copy_processor(base, output)
    return num_layers


def _check_fit(adapter: Path, base: str, shapes: dict[str, tuple[int, ...]]) -> int:
    """Raise if the adapter belongs to another model: PEFT would leave out what has no place. Returns its layers."""
    from safetensors import safe_open

    layers: set[str] = set()
    with safe_open(adapter / WEIGHTS, "pt") as stored:
        for name in stored.keys():  # noqa: SIM118  # a file, not a mapping
            layer, separator, factor = name.removeprefix(_PREFIX).partition(".lora_")
            if not separator:
                continue
            layers.add(layer)
            sizes = shapes.get(f"{layer}.weight")
            if sizes is None:
                raise UserError(f"{adapter} does not belong to {base}, which has no layer {layer}: give its base model")
            shape = stored.get_slice(name).get_shape()
            outer = shape[1] if factor.startswith(("A", "embedding_B")) else shape[0]
            if outer not in sizes:
                raise UserError(
                    f"{adapter} does not belong to {base}: its {name} is {shape}, and the layer has a weight of"
                    f" {list(sizes)}"
                )
    if not layers:
        raise UserError(f"{adapter / WEIGHTS} has no LoRA weights")
    return len(layers)
