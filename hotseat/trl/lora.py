"""PEFT's `LoraConfig` as our `train.lora`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hotseat.trl.derive import ConfigDraft

NAMES: Mapping[str, str] = {  # of PEFT -> config key
    "r": "train.lora.rank",
    "lora_alpha": "train.lora.alpha",
    "lora_dropout": "train.lora.dropout",
    "target_modules": "train.lora.target_modules",
}
# About the object or about memory alone.
WITHOUT_EFFECT = (
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "runtime_config", "megatron_core"),
)


def is_lora(config: Any) -> bool:
    """Return whether an object is PEFT's config of LoRA; PEFT's other methods have classes of their own."""
    return type(config).__name__ == "LoraConfig" and type(config).__module__.split(".")[0] == "peft"


def derive_lora(draft: ConfigDraft, config: Any) -> None:
    """Set the keys of `train.lora`, and refuse what else differs from PEFT's defaults, each by its name."""
    for field in dataclasses.fields(config):
        if field.name in (*NAMES, *WITHOUT_EFFECT):
            continue
        value, default = getattr(config, field.name), default_of(field)
        if value != default:
            draft.refuse(
                f"peft_config.{field.name}", f"{value!r}: adapters have a rank, alpha, dropout and target modules"
            )
    alpha, targets = config.lora_alpha, config.target_modules
    if targets is None:
        draft.refuse(
            "peft_config.target_modules",
            "not set: PEFT then has a list for each kind of model; name the modules, such as ['q_proj', 'v_proj'], or"
            " 'all-linear'",
        )
    else:
        named = targets if isinstance(targets, str) else sorted(targets)
        draft.set("peft_config.target_modules", {NAMES["target_modules"]: named})
    is_whole = isinstance(alpha, float) and alpha.is_integer()
    draft.set("peft_config.r", {NAMES["r"]: config.r})
    draft.set("peft_config.lora_alpha", {NAMES["lora_alpha"]: int(alpha) if is_whole else alpha})
    draft.set("peft_config.lora_dropout", {NAMES["lora_dropout"]: float(config.lora_dropout)})


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a dataclass's field; `MISSING` where it has none."""
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
