"""TRL's losses, called without a model: its methods on a stand-in `self` that hands them our tensors.

TRL pads to [episodes, tokens]; `Rows` brings flat tensors there, differentiably, so that gradients compare on the flat
ones.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor
from trl import DPOTrainer, GRPOTrainer, RewardTrainer, RLOOTrainer, SFTTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.gmpo import GMPOTrainer
from trl.experimental.orpo import ORPOTrainer

from hotseat.types import TokenLayout


class Rows:
    """Flat tokens as rows, one per episode, its segments one after another, zeros to the right."""

    def __init__(self, layout: TokenLayout):
        tokens = [torch.nonzero(layout.token_episode == episode).squeeze(1) for episode in range(layout.num_episodes)]
        width = max(len(row) for row in tokens)
        self.index = torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in tokens])
        self.exists = torch.stack([torch.arange(width) < len(row) for row in tokens])
        self.mask = self.exists & layout.mask[self.index]

    def __call__(self, flat: Tensor) -> Tensor:
        return torch.where(self.exists, flat[self.index], 0.0)


def _stub() -> MagicMock:
    stub = MagicMock()
    stub.model.training = True
    stub.model.is_gradient_checkpointing = False
    stub.aux_loss_enabled = False
    stub.current_gradient_accumulation_steps = 1
    stub.accelerator.num_processes = 1
    stub.accelerator.process_index = 0
    stub.accelerator.device = torch.device("cpu")
    stub.accelerator.gather = stub.accelerator.gather_for_metrics = lambda value: value
    stub.accelerator.reduce = lambda value, reduction: value
    stub._metrics = {"train": defaultdict(list)}
    stub._total_train_tokens, stub._tp_size = 0, 1
    return stub


def grpo_loss(
    loss_type: str,
    layout: TokenLayout,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    level: str = "token",
    delta: float | None = None,
    reference_log_probs: Tensor | None = None,
    beta: float = 0.0,
    correction: Tensor | None = None,
    entropies: Tensor | None = None,
    entropy_coef: float = 0.0,
    max_completion_length: int = 0,
    temperature_pos: float = 1.0,
    temperature_neg: float = 1.05,
) -> Tensor:
    """GRPOTrainer's loss of one batch. Advantages per token; the mask goes in as TRL's tool mask."""
    rows = Rows(layout)
    stub = _stub()
    shown = rows(torch.zeros_like(log_probs) if entropies is None else entropies)
    stub._get_per_token_logps_and_entropies.return_value = (rows(log_probs), shown, None)
    stub.loss_type, stub.importance_sampling_level = loss_type, level
    stub.epsilon_low, stub.epsilon_high, stub.beta = eps_low, eps_high, beta
    stub.top_entropy_quantile, stub.off_policy_mask_threshold = 1.0, None
    stub.use_vllm = stub.vllm_importance_sampling_correction = correction is not None
    stub.max_completion_length = max_completion_length
    stub._entropy_bonus_enabled, stub.entropy_coef, stub.use_adaptive_entropy = bool(entropy_coef), entropy_coef, False
    stub.args = SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1)
    stub.args.sapo_temperature_pos, stub.args.sapo_temperature_neg = temperature_pos, temperature_neg
    inputs: dict[str, Any] = {
        "prompt_ids": torch.zeros(layout.num_episodes, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(layout.num_episodes, 1, dtype=torch.int64),
        "completion_ids": rows.index,
        "completion_mask": rows.exists.long(),
        "tool_mask": rows.mask.long(),
        "advantages": rows(advantages),
        "old_per_token_logps": rows(old_log_probs),
        "num_items_in_batch": layout.mask.sum(),
    }
    if reference_log_probs is not None:
        inputs["ref_per_token_logps"] = rows(reference_log_probs)
    if correction is not None:
        inputs["importance_sampling_ratio"] = rows(correction)
    return GRPOTrainer._compute_loss(stub, None, inputs)


def gmpo_loss(
    layout: TokenLayout, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, low: float, high: float
) -> Tensor:
    """GMPOTrainer's loss of one batch. Advantages per episode; the clips are of log-ratios."""
    rows, stub = Rows(layout), _stub()
    stub._get_per_token_logps_and_entropies.return_value = (rows(log_probs), rows(torch.zeros_like(log_probs)), None)
    stub.epsilon_low, stub.epsilon_high, stub.beta, stub.top_entropy_quantile = low, high, 0.0, 1.0
    inputs = {
        "prompt_ids": torch.zeros(layout.num_episodes, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(layout.num_episodes, 1, dtype=torch.int64),
        "completion_ids": rows.index,
        "completion_mask": rows.exists.long(),
        "tool_mask": rows.mask.long(),
        "advantages": advantages,
        "old_per_token_logps": rows(old_log_probs),
    }
    return GMPOTrainer._compute_loss(stub, None, inputs)


def generated_batch(
    trainer: type[GRPOTrainer] | type[RLOOTrainer],
    rewards: Tensor,
    group_size: int,
    *,
    old_log_probs: Tensor | None = None,
    sampling_log_probs: Tensor | None = None,
    reference_log_probs: Tensor | None = None,
    beta: float = 0.0,
    reward_clip: tuple[float, float] | None = None,
    scale_rewards: str = "group",
    aggregation: str = "sum_then_normalize",
    reward_weights: Tensor | None = None,
    correction: str | None = None,
    low: float | None = None,
    high: float | None = None,
    truncated: list[bool] | None = None,
) -> dict[str, Tensor]:
    """What the trainer makes of samples and rewards before its loss: advantages and importance ratios.

    Log-probs are [episodes, tokens], every token sampled; groups are neighbours, all of one size. Rewards are
    [episodes], or with weights [episodes, functions].
    """
    count = len(rewards)
    old = torch.zeros(count, 2, dtype=torch.float64) if old_log_probs is None else old_log_probs
    width = old.shape[1]
    stub = _stub()
    stub.environment_factories = stub.environments = stub.tools = None
    stub.mask_truncated_completions = truncated is not None
    stub.pad_to_multiple_of, stub._tokenizer.pad_token_id, stub.eos_token_ids = None, 0, [2]
    stub.num_generations, stub.num_iterations, stub.beta = group_size, 1, beta
    rewards = rewards.reshape(count, -1)
    stub.reward_weights = torch.ones(1) if reward_weights is None else reward_weights
    stub.reward_func_names = stub.reward_funcs = [f"reward {at}" for at in range(rewards.shape[1])]
    stub.reward_clip_range, stub.normalize_advantages = reward_clip, False
    stub.multi_objective_aggregation, stub.scale_rewards = aggregation, scale_rewards
    stub.use_vllm = stub.vllm_importance_sampling_correction = correction is not None
    stub.vllm_importance_sampling_mode = correction
    stub.vllm_importance_sampling_clip_min, stub.vllm_importance_sampling_clip_max = low, high
    stub.args.steps_per_generation = stub.args.gradient_accumulation_steps = 1
    stub.args.gradient_checkpointing_kwargs = None
    stub._pending_extra_logs, stub._pending_metrics = {}, {}
    stub._calculate_rewards.return_value = rewards
    stub._get_per_token_logps_and_entropies.side_effect = lambda model, *args, **kwargs: (
        reference_log_probs if model is stub.ref_model else old,
        None,
        None,
    )
    completions = [[1] * (width - 1) + [1 if is_cut else 2] for is_cut in truncated or [False] * count]
    generated: tuple[Any, ...] = ([[1]] * count, completions, completions)
    if trainer is GRPOTrainer:
        sampling = None if sampling_log_probs is None else sampling_log_probs.tolist()
        generated = ([[1]] * count, completions, None, completions, sampling, {}, None, None)
    stub._generate.return_value = generated
    return trainer._generate_and_score_completions(stub, [{"prompt": "?"}] * count)


def _rows_of_pairs(layout: TokenLayout, log_probs: Tensor) -> tuple[Rows, Tensor]:
    """DPO's and SFT's models give log-probs of next tokens, 0 where not to be learned; the first has none."""
    rows = Rows(layout)
    return rows, torch.where(rows.mask, rows(log_probs), 0.0)[:, 1:]


def dpo_loss(
    loss_types: list[str],
    layout: TokenLayout,
    log_probs: Tensor,
    reference_log_probs: Tensor,
    *,
    beta: float,
    loss_weights: list[float] | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """DPOTrainer's loss. The first half of the episodes are the chosen answers; no first token is to be learned."""
    rows, policy = _rows_of_pairs(layout, log_probs)
    _, reference = _rows_of_pairs(layout, reference_log_probs)
    stub = _stub()
    stub.ld_alpha, stub.precompute_ref_logps, stub.use_weighting = None, False, False
    stub.f_divergence_type, stub.beta, stub.label_smoothing = "reverse_kl", beta, label_smoothing
    stub.loss_types, stub.loss_weights = loss_types, loss_weights or [1.0] * len(loss_types)
    stub.args.gradient_checkpointing_kwargs = None

    def model_giving(values: Tensor):
        facts = torch.zeros_like(values.detach())
        return lambda **_: SimpleNamespace(log_probs=values, entropy=facts, mean_logits=facts, is_top1=facts.bool())

    stub.ref_model = model_giving(reference)
    inputs = {
        "input_ids": rows.index,
        "attention_mask": rows.exists.long(),
        "completion_mask": rows.mask.long(),
    }
    return DPOTrainer._compute_loss(stub, model_giving(policy), inputs, return_outputs=False)


class _Double(torch.Tensor):
    """A tensor that becomes float64 where TRL asks for float32."""

    def float(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.double()


def _loss_without_reference(trainer: Any, stub: MagicMock, token_ids: Tensor, mask: Tensor, logits: Tensor) -> Tensor:
    """The loss of a trainer that has no reference model, from logits [2 · pairs, tokens, vocabulary], chosen first."""
    stub.is_encoder_decoder, stub.padding_value, stub.use_weighting = False, 0, False
    for name in ("get_batch_logps", "concatenated_inputs"):
        setattr(stub, name, getattr(trainer, name))
    stub.concatenated_forward = lambda *args: trainer.concatenated_forward(stub, *args)
    half = len(token_ids) // 2
    batch = {}
    for name, rows in (("chosen", slice(0, half)), ("rejected", slice(half, None))):
        batch[f"{name}_input_ids"] = token_ids[rows]
        # Prompts and answers: what follows an answer is padding.
        batch[f"{name}_attention_mask"] = mask[rows].flip(-1).cumsum(-1).flip(-1).clamp(max=1)
        batch[f"{name}_labels"] = torch.where(mask[rows], token_ids[rows], -100)
    outputs = SimpleNamespace(logits=logits.as_subclass(_Double))
    return trainer.get_batch_loss_metrics(stub, lambda *_, **__: outputs, batch)[0]


def orpo_loss(token_ids: Tensor, mask: Tensor, logits: Tensor, *, beta: float) -> Tensor:
    """ORPOTrainer's loss. Its likelihood term counts every token but the first of each chosen row."""
    stub = _stub()
    stub.beta = beta
    stub.odds_ratio_loss = lambda *args: ORPOTrainer.odds_ratio_loss(stub, *args)
    return _loss_without_reference(ORPOTrainer, stub, token_ids, mask, logits)


def simpo_loss(token_ids: Tensor, mask: Tensor, logits: Tensor, *, beta: float, gamma: float) -> Tensor:
    """CPOTrainer's loss of type simpo, without its likelihood term."""
    stub = _stub()
    stub.beta, stub.simpo_gamma, stub.label_smoothing, stub.alpha, stub.cpo_alpha = beta, gamma, 0.0, 0.0, 0.0
    stub.loss_type = "simpo"
    stub.cpo_loss = lambda *args: CPOTrainer.cpo_loss(stub, *args)
    return _loss_without_reference(CPOTrainer, stub, token_ids, mask, logits)


def sft_loss(layout: TokenLayout, log_probs: Tensor, num_items_in_batch: int | None = None) -> Tensor:
    """SFTTrainer's loss."""
    rows, values = _rows_of_pairs(layout, log_probs)
    facts = torch.zeros_like(values.detach())
    outputs = SimpleNamespace(log_probs=values, entropy=facts, is_top1=facts.bool(), label_mask=rows.mask[:, 1:])
    stub = _stub()
    stub.compute_loss_func = stub.label_smoother = None
    stub.args = SimpleNamespace(loss_type="nll", average_tokens_across_devices=False)
    inputs = {"input_ids": rows.index, "attention_mask": rows.exists.long(), "labels": rows.index}
    return SFTTrainer.compute_loss(stub, lambda **_: outputs, inputs, num_items_in_batch=num_items_in_batch)


def reward_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """RewardTrainer's loss."""
    stub = _stub()
    stub.args.center_rewards_coefficient = None
    inputs = {"attention_mask": torch.ones(2 * len(chosen), 1)}
    if margin is not None:
        inputs["margin"] = margin
    logits = torch.cat([chosen, rejected]).unsqueeze(1)
    return RewardTrainer.compute_loss(stub, lambda **_: SimpleNamespace(logits=logits), inputs)
