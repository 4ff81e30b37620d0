"""Sources of models. Transformers is imported where it is used: settings with a source need no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotseat.errors import UnsupportedError

NUMERIC = "hotseat_numeric"  # `model_type` of policies that act in numbers, in their config.json


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint, and how its files are loaded. name: its folder, or its name on the hub.

    rope_scaling: parameters by which its rotary positions are stretched; empty: they stay as they are.
    """

    name: str
    trust_remote_code: bool = False  # run Python files that come with it
    rope_scaling: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of transformers' `from_pretrained` and `from_config`, besides the name."""
        return {"trust_remote_code": self.trust_remote_code}

    def config(self) -> Any:
        from transformers import AutoConfig

        self._know_numeric()
        config = AutoConfig.from_pretrained(self.name, **self.arguments)
        if self.rope_scaling:
            _stretch(config, dict(self.rope_scaling))
        return config

    @property
    def is_numeric(self) -> bool:
        """Tell whether it is a folder with a policy that acts in numbers (`hotseat.numeric`)."""
        try:
            written = json.loads((Path(self.name) / "config.json").read_text())
        except (OSError, ValueError):
            return False
        return isinstance(written, dict) and written.get("model_type") == NUMERIC

    def _know_numeric(self) -> None:
        """Make transformers know the classes of a policy that acts in numbers, if this is one."""
        if self.is_numeric:
            import hotseat.numeric.models  # noqa: F401

    @property
    def own_config(self) -> dict[str, Any]:
        """Arguments of `from_pretrained` by which a model is loaded with another config than the checkpoint's."""
        return {"config": self.config()} if self.rope_scaling else {}

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        self._know_numeric()
        return AutoTokenizer.from_pretrained(self.name, **self.arguments)


def _stretch(config: Any, scaling: dict[str, Any]) -> None:
    """Replace the rope parameters and the number of positions of a model's config."""
    name, before = type(config).__name__.removesuffix("Config"), getattr(config, "rope_parameters", None)
    positions = getattr(config, "max_position_embeddings", None)
    if config.get_text_config() is not config or not positions or not before or "rope_theta" not in before:
        raise UnsupportedError(
            f"actor.rope_scaling: {name} has no rotary positions of one kind in all layers, which could be stretched:"
            " unset it"
        )
    config.rope_parameters, config.max_position_embeddings = stretched(scaling, before, positions)


def stretched(scaling: Mapping[str, Any], before: Mapping[str, Any], positions: int) -> tuple[dict[str, Any], int]:
    """Return rope parameters and the number of positions of a model that has `before` and `positions`."""
    original = scaling.get("original_max_position_embeddings") or before.get("original_max_position_embeddings")
    original = int(original or positions)
    parameters = {"rope_theta": before.get("rope_theta")} if before.get("rope_theta") is not None else {}
    if "partial_rotary_factor" in before:
        parameters["partial_rotary_factor"] = before["partial_rotary_factor"]
    parameters |= scaling
    if scaling["rope_type"] == "linear":
        parameters.pop("original_max_position_embeddings", None)  # which transformers does not take there
        if before.get("rope_type") == "linear":  # whose positions are stretched already
            return parameters, int(positions / before["factor"] * scaling["factor"])
    else:
        parameters["original_max_position_embeddings"] = original
    return parameters, int(original * scaling["factor"])
