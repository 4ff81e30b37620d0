"""Checks of models by their configs, without loading them; and the tokens that end their answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hotseat.checks.named_files import length_problem, models_of, num_positions
from hotseat.checks.stage import CheckContext, DataContext
from hotseat.checks.tokenizers import tokenizer_of
from hotseat.config import Config
from hotseat.config.presence import (
    has_critic,
    has_images,
    has_judge_engine,
    has_simulator,
)
from hotseat.config.resolved import critic_model, judge_length, max_new_tokens, source_of
from hotseat.errors import Problem, UnsupportedError, UserError
from hotseat.model_source import NUMERIC
from hotseat.registry.engines import DEFAULT_ENGINE, ENGINES, engine_entry
from hotseat.registry.lookup import names_that


def models(context: CheckContext) -> Iterator[Problem]:
    """Find models that cannot do what the run needs, as far as their configs show."""
    config = context.config
    assert config.actor.model is not None
    is_value = config.task_entry.has_scalar_head
    aux_loss = config.algorithm.aux_loss_coef
    yield from _model(config, "actor.model", config.actor.model, is_value=is_value, is_trained=True, aux_loss=aux_loss)
    if has_critic(config):
        yield from _model(config, "critic.model", critic_model(config), is_value=True, is_trained=True)
    for key, model in models_of(config):
        if key.startswith("reference."):
            yield from _model(config, key, model)
        elif key == "reward.model":
            yield from _model(config, key, model, is_value=True)
    if has_judge_engine(config):
        yield from _judge(config)


def _judge(config: Config) -> Iterator[Problem]:
    model, length = config.reward.judge.model, judge_length(config)
    assert model is not None
    try:
        model_config = source_of(config, model).config()
        _check_engine(config.reward.judge.engine.kind, length, model_config)
        if (problem := length_problem(config, "reward.judge.model", model, model_config.to_dict())) is not None:
            yield Problem("", str(problem))
    except (UserError, OSError, ValueError) as error:
        yield _described("reward.judge.model", model, error)
    else:
        judge_eos_token_ids(config)


def _model(
    config: Config, key: str, model: str, *, is_value: bool = False, is_trained: bool = False, aux_loss: float = 0.0
) -> Iterator[Problem]:
    from hotseat.train.liger import check_liger
    from hotseat.train.lora import check_language_targets, check_targets
    from hotseat.train.model_checks import (
        check_fit,
        check_length,
        check_nf4,
        check_stored_head,
        check_value_head,
    )

    source = source_of(config, model)
    try:
        model_config = source.config()
        _check_images(config, model_config)
        check_fit(model_config, config.train.sequence_parallel_size, config.train.tensor_parallel_size, aux_loss)
        check_length(model_config, config.data.max_length)
        if (problem := length_problem(config, key, model, model_config.to_dict())) is not None:
            raise UserError(str(problem))
        if key == "actor.model" and config.has_rollouts:
            rollout = config.rollout
            _check_engine(rollout.engine, config.data.max_length, model_config, rollout.tensor_parallel_size)
            if rollout.routing_replay:
                _check_routing(config, model_config)
            if rollout.prefix_caching:
                _check_prefixes(rollout.engine, model_config)
            _check_latent(config, model_config)
            if rollout.quantization is not None:
                _check_quantisation(model_config)
        if key == "reference.model" and config.reference.engine is not None:
            _check_teacher_engine(config, model_config)
        if config.train.liger_kernel:
            check_liger(model_config)
        if is_value:
            check_value_head(model_config)
        if is_value and not is_trained:
            check_stored_head(Path(model), model_config, config.reward.value_head_prefix)
        lora = config.train.lora
        if lora.rank > 0 and is_trained:
            check_targets(source, lora.target_modules, "value" if is_value else "policy")
        if config.train.load_in_4bit and is_trained:
            check_nf4(model_config, config.rollout.tensor_parallel_size if key == "actor.model" else 1)
        if key == "actor.model" and has_images(config) and config.rollout.lora_sync == "adapter":
            check_language_targets(source, lora.target_modules)
    except (UserError, OSError, ValueError) as error:
        yield _described(key, model, error)


def _described(key: str, model: str, error: Exception) -> Problem:
    reason = str(error) if isinstance(error, UserError) else f"no model there: {error}"
    return Problem("", f"{key} {model!r}: {reason}")


def _check_images(config: Config, model_config: Any) -> None:
    """Raise if a run has images and a model takes none, or the other way round."""
    from hotseat.vision import sees_images

    name, takes_images = type(model_config).__name__.removesuffix("Config"), sees_images(model_config)
    key = "data.image_key" if config.data.image_key is not None else "env.images"
    if has_images(config) and not takes_images:
        raise UserError(f"{name} takes no images here, and {key} is set: choose a vision-language model, or unset it")
    if not has_images(config) and takes_images:
        key = "env.images" if has_simulator(config) else "data.image_key"
        raise UserError(f"{name} takes images, and the run has none: set {key}, or choose a model of text alone")


def _check_engine(kind: str, max_length: int, model_config: Any, tensor_parallel_size: int = 1) -> None:
    """Raise if an engine of this kind cannot run a model of this config."""
    import torch

    from hotseat.rollout.kinds import engine_kind

    if engine_entry(kind).acts_in_numbers != (model_config.model_type == NUMERIC):
        name = type(model_config).__name__.removesuffix("Config")
        fit = names_that(ENGINES, "acts_in_numbers") if model_config.model_type == NUMERIC else [DEFAULT_ENGINE]
        raise UserError(f"{name} does not run on rollout.engine {kind}: set it to {', '.join(fit)}")
    engine_kind(kind).check_model(model_config, max_length, tensor_parallel_size, not torch.cuda.is_available())


def _check_routing(config: Config, model_config: Any) -> None:
    """Raise if the experts that tokens take in a model of this config cannot be recorded and replayed."""
    import torch

    from hotseat.algorithms.routing import check_replay
    from hotseat.rollout.kinds import engine_kind

    check_replay(model_config)
    kind = engine_kind(config.rollout.engine)
    problem = kind.routing_problem(config.rollout.prefix_caching, is_cpu=not torch.cuda.is_available())
    if problem is not None:
        raise UserError(f"rollout.routing_replay is set, and {problem}")


def _check_prefixes(kind: str, model_config: Any) -> None:
    """Raise if engines of this kind cannot cache the prefixes of a model of this config."""
    import torch

    from hotseat.rollout.kinds import engine_kind

    problem = engine_kind(kind).prefix_problem(model_config, is_cpu=not torch.cuda.is_available())
    if problem is not None:
        raise UnsupportedError(f"rollout.prefix_caching is true: {problem}")


def _check_latent(config: Config, model_config: Any) -> None:
    """Raise if an option has not been tried with engines whose latent attention gets what is pushed."""
    if not getattr(model_config.get_text_config(), "kv_lora_rank", None):
        return
    rollout, name = config.rollout, type(model_config).__name__.removesuffix("Config")
    instead = {
        f"rollout.quantization: {rollout.quantization}": rollout.quantization and "unset it",
        f"rollout.kv_cache_dtype: {rollout.kv_cache_dtype}": rollout.kv_cache_dtype and "unset it",
        "rollout.lora_sync: adapter": rollout.lora_sync == "adapter" and "set it to merged",
    }
    for option, what in instead.items():
        if what:
            raise UnsupportedError(f"{name} has latent attention, with which {option} has not been tried: {what}")


def _check_teacher_engine(config: Config, model_config: Any) -> None:
    """Raise if the teacher's engine cannot run a model of this config, or not score sequences of full length."""
    assert config.reference.engine is not None
    _check_engine(config.reference.engine, config.data.max_length, model_config)
    positions = num_positions(model_config.to_dict())
    if positions is not None and config.data.max_length >= positions:
        raise UserError(
            f"on an engine it samples a token behind each sequence that it scores, and data.max_length is all of its"
            f" {positions} positions: set that to {positions - 1} or less, or leave reference.engine unset"
        )


def _check_quantisation(model_config: Any) -> None:
    """Raise if the weights of a model of this config cannot be pushed to engines that keep them in FP8."""
    text = model_config.get_text_config()
    if any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        name = type(model_config).__name__.removesuffix("Config")
        raise UnsupportedError(
            f"rollout.quantization is fp8, and {name} has experts, which it is not built for: unset it"
        )


def teachers(context: DataContext) -> Iterator[Problem]:
    """Find prompts that do not name their teacher, where each has one."""
    prompts, named_teachers = context.prompts, context.config.reference.teachers
    if not named_teachers or context.config.reference.teacher_weights:
        return
    without = Counter(prompt.source for prompt in prompts if prompt.source not in named_teachers)
    if without:
        named = ", ".join(f"{repr(source) if source else 'none'} ({count:,})" for source, count in without.items())
        yield Problem(
            "",
            f"reference.teachers: {sum(without.values()):,} of {len(prompts):,} prompts name no teacher in their column"
            f" datasource: {named}; teachers are {', '.join(named_teachers)}. Correct the rows, or set"
            " reference.teacher_weights, by which all teach every prompt",
        )


def given_answers(context: DataContext) -> Iterator[Problem]:
    """Find prompts without the answer that is to be learned from where it is not sampled."""
    distill, prompts = context.config.algorithm.distill, context.prompts
    lacking = sum(not prompt.answer for prompt in prompts)
    if distill.answer_key is not None and lacking:
        yield Problem(
            "algorithm.distill.answer_key",
            f"{distill.answer_key!r}: {lacking:,} of {len(prompts):,} prompts have no text there, and"
            f" algorithm.distill.sampled is {distill.sampled:g}: complete the rows, or set that to 1",
        )


def teacher_prompts(context: DataContext) -> Iterator[Problem]:
    """Find prompts without one for their teacher, or with one that leaves no room for the answer."""
    config, prompts = context.config, context.prompts
    column, key = config.algorithm.distill.teacher_input_key, "algorithm.distill.teacher_input_key"
    if column is None or not prompts:
        return
    lacking = sum(not prompt.teacher_prompt for prompt in prompts)
    if lacking:
        yield Problem(key, f"{column!r}: {lacking:,} of {len(prompts):,} prompts have none there: complete the rows")
    longest = max(len(prompt.teacher_prompt) for prompt in prompts) + max_new_tokens(config)
    if longest > config.data.max_length:
        yield Problem(
            key,
            f"{column!r}: with an answer of {max_new_tokens(config)} tokens the longest has {longest:,}, and"
            f" data.max_length is {config.data.max_length:,}: raise it, or lower rollout.max_new_tokens",
        )


def eos_token_ids(config: Config, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end an answer: the tokenizer's, those of the model's generation config, and harmony's."""
    assert config.actor.model is not None
    return _eos_token_ids("actor.model", config.actor.model, tokenizer)


def judge_eos_token_ids(config: Config) -> tuple[int, ...]:
    """Return the tokens that end what the judge writes. Raises if its tokenizer cannot be loaded."""
    model = config.reward.judge.model
    assert model is not None
    return _eos_token_ids("reward.judge.model", model, tokenizer_of(config, "reward.judge.model", model))


def _eos_token_ids(key: str, model: str, tokenizer: Any) -> tuple[int, ...]:
    from transformers import GenerationConfig

    from hotseat.agents.harmony import end_token_ids

    token_ids = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    try:
        more = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # a model need not have one
        more = None
    token_ids |= set(more) if isinstance(more, list) else {more} if more is not None else set()
    token_ids |= end_token_ids(tokenizer)
    if not token_ids:
        raise UserError(f"{key} {model!r}: its tokenizer has no end-of-sequence token; set eos_token")
    return tuple(sorted(token_ids))
