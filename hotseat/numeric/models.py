"""Gaussian policies over vectors and their value models, as models of transformers, which load, save and name weights.

    a ~ N(μ(s), diag(σ²)),  log p(a_d) = −(a_d − μ_d)² / 2σ_d² − log σ_d − ½ log 2π,  entropy_d = ½ + ½ log 2π + log σ_d

log σ is a weight of its own for each number of a chunk, whatever the state (Andrychowicz et al., "What Matters in
On-Policy Reinforcement Learning?", 2021; CleanRL, RLinf's mlp_policy). At temperature T the variance is T·σ²: the
density to the power of 1/T, as with logits.

The importer of this module makes transformers know these classes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from hotseat.model_source import NUMERIC
from hotseat.numeric.float_tokens import tensor_of
from hotseat.numeric.number_tokenizer import NumberTokenizer

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
_ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}


class NumericConfig(PreTrainedConfig):
    """Sizes of a policy that acts in numbers.

    A step of its sequences is `state_dim` numbers that it reads, then `action_dim * num_actions` that it samples.
    """

    model_type = NUMERIC

    def __init__(
        self,
        state_dim: int = 1,
        action_dim: int = 1,
        num_actions: int = 1,
        hidden_sizes: Sequence[int] = (64, 64),
        activation: str = "tanh",
        log_std: float = 0.0,
        **kwargs: Any,
    ):
        self.state_dim, self.action_dim, self.num_actions = state_dim, action_dim, num_actions
        self.hidden_sizes, self.activation, self.log_std = list(hidden_sizes), activation, log_std
        self.vocab_size = 2  # of made-up tokens in trials; real ones are any float32
        super().__init__(**kwargs)

    @property
    def num_sampled(self) -> int:
        return self.action_dim * self.num_actions

    @property
    def step_width(self) -> int:
        return self.state_dim + self.num_sampled


class _NumericModel(PreTrainedModel):
    config_class = NumericConfig
    base_model_prefix = ""
    _no_split_modules: ClassVar[list[str]] = []
    generation_config = None  # which exports copy

    def __init__(self, config: NumericConfig):
        super().__init__(config)
        sizes = [config.state_dim, *config.hidden_sizes]
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), _ACTIVATIONS[config.activation]()]
        self.body = nn.Sequential(*layers)

    def _init_weights(self, module: nn.Module) -> None:
        """Draw the weights of a layer: orthogonal, with CleanRL's gains."""
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight, math.sqrt(2))
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def get_input_embeddings(self) -> nn.Module:
        return self.body


class NumericPolicy(_NumericModel):
    """A Gaussian policy: an MLP for the means, and a deviation for each number of a chunk."""

    def __init__(self, config: NumericConfig):
        super().__init__(config)
        self.mean = nn.Linear(config.hidden_sizes[-1], config.num_sampled)
        self.log_std = nn.Parameter(torch.full((config.num_sampled,), config.log_std))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self.mean:
            nn.init.orthogonal_(module.weight, 0.01)
        if module is self:
            nn.init.constant_(self.log_std, self.config.log_std)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return means [n, num_sampled] and log-deviations [num_sampled] for states [n, state_dim]."""
        return self.mean(self.body(states)), self.log_std


class NumericValue(_NumericModel):
    """A value model: an MLP of its own, and one number for each state. Loaded from a policy, it has its body."""

    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"mean\.", "log_std"]

    def __init__(self, config: NumericConfig):
        super().__init__(config)
        self.score = nn.Linear(config.hidden_sizes[-1], 1, bias=False)
        self.post_init()

    def forward(self, states: Tensor) -> Tensor:
        """Return the value of each state: [n, state_dim] in, [n] out."""
        return self.score(self.body(states)).squeeze(-1)


AutoConfig.register(NUMERIC, NumericConfig)
AutoModelForCausalLM.register(NumericConfig, NumericPolicy)
AutoModelForSequenceClassification.register(NumericConfig, NumericValue)
AutoTokenizer.register(NumericConfig, slow_tokenizer_class=NumberTokenizer)


def gaussian_log_probs(actions: Tensor, means: Tensor, log_std: Tensor, temperature: Tensor | float) -> Tensor:
    """Return the log-prob of each number, at the temperature. actions, means: [n, D]; log_std: [D] -> [n, D]."""
    log_std = log_std + 0.5 * torch.log(torch.as_tensor(temperature, dtype=log_std.dtype))
    return -0.5 * ((actions - means) * torch.exp(-log_std)) ** 2 - log_std - _HALF_LOG_2PI


def gaussian_entropy(log_std: Tensor, temperature: float) -> Tensor:
    """Return the entropy of each number of a chunk, at the temperature: [D] in and out."""
    return 0.5 + _HALF_LOG_2PI + log_std + 0.5 * math.log(temperature)


def steps_of(token_ids: Tensor, config: NumericConfig) -> tuple[Tensor, Tensor]:
    """Cut the tokens of whole steps into states [n, state_dim] and sampled numbers [n, num_sampled].

    Made-up tokens may end in the middle of a step, which is then filled up with zeros.
    """
    missing = -len(token_ids) % config.step_width
    steps = tensor_of(functional.pad(token_ids, (0, missing))).view(-1, config.step_width)
    return steps[:, : config.state_dim], steps[:, config.state_dim :]


class NumericScorer(nn.Module):
    """Model that trainers call: a numeric model over whole steps, and its outputs for the tokens that are scored.

    Tokens of a micro-batch are steps one after another, since every segment is a number of them.
    """

    def __init__(self, model: NumericPolicy | NumericValue):
        super().__init__()
        self.model = model
        self.has_plain_scores = True

    def forward(self, inputs: Any, temperature: float = 1.0, with_entropy: bool = False) -> dict[str, Tensor]:
        """Compute `log_probs` and, if asked for, `entropy`; of a value model `values`: [num_scored] each."""
        config, model = self.model.config, self.model
        states, sampled = steps_of(inputs.input_ids[0], config)
        dtype = next(model.parameters()).dtype

        def of_tokens(values: Tensor) -> Tensor:
            """Return the values of the scored tokens, from those of sampled numbers: [n, num_sampled]."""
            return functional.pad(values.float(), (config.state_dim, 0)).reshape(-1)[inputs.tokens]

        if isinstance(model, NumericValue):
            # Of every number, so that trials and micro-batches that score a state's number have a value, too.
            return {"values": model(states.to(dtype))[:, None].expand(-1, config.step_width).reshape(-1)[inputs.tokens]}
        means, log_std = model(states.to(dtype))
        outputs = {"log_probs": of_tokens(gaussian_log_probs(sampled, means.float(), log_std.float(), temperature))}
        if with_entropy:
            outputs["entropy"] = of_tokens(gaussian_entropy(log_std.float(), temperature).expand_as(sampled))
        return outputs


def write_policy(folder: str | Path, config: NumericConfig, seed: int = 0) -> None:
    """Write a policy with new weights, and its tokenizer, into a folder that `actor.model` can name."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        NumericPolicy(config).save_pretrained(folder)
    NumberTokenizer().save_pretrained(folder)
