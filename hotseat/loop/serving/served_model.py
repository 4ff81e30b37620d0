"""A reward model that scores texts: one of ours or OpenRLHF's, or any sequence classifier with one output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from hotseat.algorithms.shaping import normalise_rewards
from hotseat.errors import UserError
from hotseat.model_source import ModelSource
from hotseat.observe.noise import without_log_lines
from hotseat.vision import sees_images
from hotseat.words import quantity

_SCORE = "score"  # the head of models that read from left to right, in transformers
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ModelOptions:
    """Settings of a reward model.

    max_length: tokens of a text at most, if the model has positions for more. dtype: None is bf16 on CUDA devices
    and fp32 elsewhere. device: None is the first CUDA device, if there is one.
    """

    model: ModelSource
    max_length: int | None = None
    dtype: str | None = None
    device: str | None = None
    value_head_prefix: str = _SCORE
    normalize: bool = False


class RewardModel:
    """Scores texts, which contain the special tokens that the model is to see.

    A model with a `score` head reads from left to right (`is_causal`), and its reward is the head's output at the
    text's last token. Any other classifier gets its own special tokens around the text, and its reward is its only
    logit.
    """

    def __init__(self, options: ModelOptions):
        self._device = torch.device(options.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        self.dtype = options.dtype or ("bf16" if self._device.type == "cuda" else "fp32")
        self.tokenizer = _load_tokenizer(options)
        config = _load_config(options)
        self._scale = _stored_scale(options.model.name, config) if options.normalize else None
        self._model = _load(options, config, _DTYPES[self.dtype]).to(self._device).eval()
        self.is_causal = hasattr(self._model, _SCORE)
        limits = [limit for limit in (options.max_length, _num_positions(config)) if limit]
        self.max_length = min(limits, default=None)
        self._padding = self.tokenizer.pad_token_id or 0

    @property
    def description(self) -> str:
        """The model's class, size, type and device, and its longest text."""
        millions = sum(weight.numel() for weight in self._model.parameters()) / 1e6
        longest = "" if self.max_length is None else f", texts of up to {quantity(self.max_length, 'token')}"
        return f"{type(self._model).__name__}, {millions:,.1f}M weights, {self.dtype} on {self._device.type}{longest}"

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        return list(self.tokenizer(list(texts), add_special_tokens=not self.is_causal)["input_ids"])

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return the reward of each token sequence, in one forward over rows that are padded on the right."""
        longest = max(map(len, sequences))
        rows = [[*tokens, *[self._padding] * (longest - len(tokens))] for tokens in sequences]
        input_ids = torch.tensor(rows, device=self._device)  # [num_sequences, longest]
        lengths = torch.tensor([len(tokens) for tokens in sequences], device=self._device)
        mask = None
        if min(map(len, sequences)) < longest:
            mask = (torch.arange(longest, device=self._device) < lengths[:, None]).long()
        rewards = self._rewards(input_ids, mask, lengths).float()
        if self._scale is not None:
            rewards = normalise_rewards(rewards, *self._scale)
        return rewards.tolist()

    def _rewards(self, input_ids: Tensor, mask: Tensor | None, lengths: Tensor) -> Tensor:
        if not self.is_causal:
            return self._model(input_ids=input_ids, attention_mask=mask).logits[:, 0]
        hidden = self._model.base_model(input_ids=input_ids, attention_mask=mask, use_cache=False).last_hidden_state
        last = hidden[torch.arange(len(lengths), device=self._device), lengths - 1]  # [num_sequences, width]
        return getattr(self._model, _SCORE)(last)[:, 0]


def _load_tokenizer(options: ModelOptions) -> Any:
    try:
        return options.model.tokenizer()
    except (OSError, ValueError) as error:
        raise UserError(f"{options.model.name!r}: no tokenizer there: {error}") from None


def _load_config(options: ModelOptions) -> Any:
    folder = Path(options.model.name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"{options.model.name!r} is no checkpoint: there is no config.json in it")
    try:
        return options.model.config()
    except (OSError, ValueError) as error:
        raise UserError(f"{options.model.name!r}: no model there: {error}") from None


def _load(options: ModelOptions, config: Any, dtype: torch.dtype) -> Any:
    name = options.model.name
    if sees_images(config):
        raise UserError(f"{name!r} sees images, and requests for rewards have none: choose a model of text")
    config.num_labels = 1
    prefix = getattr(config, "value_head_prefix", options.value_head_prefix)  # a model of ours or OpenRLHF's says it
    renamed = {} if prefix == _SCORE else {"key_mapping": {rf"^{prefix}\.": f"{_SCORE}."}}
    try:
        with without_log_lines("transformers.modeling_utils", lambda text: "LOAD REPORT" in text):
            model, info = AutoModelForSequenceClassification.from_pretrained(
                name,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                **options.model.arguments,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **renamed,
            )
    except (OSError, ValueError) as error:
        raise UserError(f"{name!r}: no model there: {error}") from None
    for mismatch in info["mismatched_keys"]:
        weight, stored, *_ = mismatch
        raise UserError(
            f"{name!r}: its {weight} has the shape {list(stored)}, and a reward is one number: choose a model with one"
            " output"
        )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise UserError(
            f"{name!r} is no reward model: it lacks {quantity(len(missing), 'weight')} of a"
            f" {type(model).__name__}, such as {missing[0]}; choose a reward model, or set the prefix of its head"
            f" (now {prefix!r})"
        )
    return model


def _stored_scale(model: str, config: Any) -> tuple[float, float]:
    mean, std = getattr(config, "mean", None), getattr(config, "std", None)
    if isinstance(mean, int | float) and isinstance(std, int | float) and std > 0:
        return float(mean), float(std)
    raise UserError(
        f"{model!r}: normalising needs the mean and the std of its rewards in config.json, as training leaves them"
        f" there; they are {mean} and {std}"
    )


def _num_positions(config: Any) -> int | None:
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    return int(positions) if positions else None
