"""The sampling parameters that agent files read and may change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hotseat.errors import UnsupportedError
from hotseat.types import Sampling


@dataclass
class SamplingParams:
    """Sampling parameters that agent files read and may change, with the names that vLLM's have."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = 1
    n: int = 1
    min_tokens: int = 0
    min_p: float = 0.0
    stop: Any = None
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    skip_special_tokens: bool = False
    include_stop_str_in_output: bool = True


_ONLY_DEFAULT = ("n", "min_tokens", "min_p", "stop", "presence_penalty", "frequency_penalty", "repetition_penalty")


def shown(sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or -1,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        stop=list(sampling.stop) or None,
    )


def read_back(params: Any, sampling: Sampling) -> Sampling:
    """Translate sampling parameters, ours or vLLM's own, into a `Sampling`."""
    plain = shown(sampling)
    for name in _ONLY_DEFAULT:
        default, value = getattr(plain, name), getattr(params, name, None)
        if value != default and value not in (None, []):
            raise UnsupportedError(f"sampling_params.{name} = {value!r}: an agent cannot set it in this version")
    top_k = getattr(params, "top_k", plain.top_k)
    return Sampling(
        max_new_tokens=getattr(params, "max_tokens", None) or sampling.max_new_tokens,
        temperature=getattr(params, "temperature", plain.temperature),
        top_p=getattr(params, "top_p", plain.top_p),
        top_k=0 if top_k in (None, -1) else top_k,
        stop_token_ids=tuple(getattr(params, "stop_token_ids", None) or ()),
        ignore_eos=getattr(params, "ignore_eos", plain.ignore_eos),
        stop=sampling.stop,
    )
