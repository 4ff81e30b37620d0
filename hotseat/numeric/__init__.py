"""Policies that act in numbers: small torch modules for states and actions that are vectors.

A number is a token whose id is the 32 bits of its float32 (`float_tokens`), so that requests, segments, log-probs,
ledger, checkpoints and pushes are those of language models. What differs is the model (`models`), its tokenizer
(`number_tokenizer`), and the engine that runs it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["NumericConfig", "write_policy"]


def __getattr__(name: str) -> Any:
    """Load the models, and with them torch and transformers, when a public name is used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hotseat.numeric import models

    return getattr(models, name)
