"""Conflicts between models and the precision in which engines compute."""

from __future__ import annotations

from hotseat.config.annotations import RL
from hotseat.config.conflicts.conflict_list import Problems, conflict
from hotseat.config.presence import has_critic
from hotseat.config.schema import Config


@conflict(RL)
def heads_of_other_names(config: Config) -> Problems:
    critic, reward = config.critic, config.reward
    heads = critic.value_head_prefix, reward.value_head_prefix
    if has_critic(config) and critic.model is None and reward.model is not None and heads[0] != heads[1]:
        yield (
            "critic.value_head_prefix",
            f"{heads[0]!r}, but the critic begins as reward.model, whose head is called {heads[1]!r}"
            " (reward.value_head_prefix) and would be lost: set both alike, or critic.model",
        )


@conflict(RL)
def fp8_engines_of_fp32(config: Config) -> Problems:
    for key in ("quantization", "kv_cache_dtype"):
        if getattr(config.rollout, key) is not None and config.train.dtype == "fp32":
            why = "fp8 is for 16-bit models, and train.dtype is fp32: set that to bf16, or leave this unset"
            yield f"rollout.{key}", why


@conflict(RL)
def fp8_engines_beside_adapters(config: Config) -> Problems:
    if config.rollout.quantization is not None and config.rollout.lora_sync == "adapter":
        why = "fp8 has not been tried with adapters that vLLM applies itself: set rollout.lora_sync to merged"
        yield "rollout.quantization", why


@conflict(RL)
def deterministic_fp8_engines(config: Config) -> Problems:
    if config.rollout.quantization is not None and config.train.full_determinism:
        yield (
            "rollout.quantization",
            "fp8 has not been tried with train.full_determinism, for which vLLM, depending on its kernels, turns"
            " weights back into 16 bits and rounds no inputs: set that to false, or leave this unset",
        )
