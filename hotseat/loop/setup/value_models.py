"""Checks the models beside the policy (critic, reference, reward model) by their configs, without loading them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotseat.config import Config
from hotseat.config.roles import has_critic, has_images, has_reference, has_reward_model
from hotseat.errors import UserError

_NUM_NAMED = 3  # tokens in an error message


def critic_model(config: Config) -> str:
    """Return the critic's checkpoint: its own, else the reward model's, else the actor's."""
    model = config.critic.model or config.reward.model or config.actor.model
    assert model is not None
    return model


def critic_aux_loss(config: Config) -> float:
    """Return the coefficient of the critic's balancing loss: the actor's if the critic has experts, else 0."""
    if not config.algorithm.aux_loss_coef:
        return 0.0
    from transformers import AutoConfig

    from hotseat.train.experts import has_experts

    model_config = AutoConfig.from_pretrained(critic_model(config), trust_remote_code=config.trust_remote_code)
    return config.algorithm.aux_loss_coef if has_experts(model_config) else 0.0


def check_readers(config: Config, tokenizer: Any) -> None:
    """Raise unless critic, reward model and reference can read the policy's tokens and take its pixels.

    `tokenizer`: the actor's. Images are prepared once for all models of a run.
    """
    if has_reward_model(config):
        reward_scale(config)
        _check_reward_model(config, tokenizer)
    if has_critic(config) and critic_model(config) != config.actor.model:
        _check_critic(config, tokenizer)
    if has_reference(config):
        for key, model in _models_beside(config).items():
            if key.startswith("reference.") and model != config.actor.model:
                _check_reference(config, tokenizer, key, model)
    if has_images(config):
        _check_eyes(config, tokenizer)


def _check_eyes(config: Config, tokenizer: Any) -> None:
    """Raise unless all models of a run prepare images in the same way."""
    from hotseat.data.images import load_processor, preparation

    assert config.actor.model is not None
    expected = preparation(load_processor(config.actor.model, tokenizer, config.trust_remote_code))
    for key, model in _models_beside(config).items():
        if model == config.actor.model:
            continue
        theirs = preparation(load_processor(model, tokenizer, config.trust_remote_code))
        different = sorted(name for name in expected | theirs if expected.get(name) != theirs.get(name))
        if different:
            named = ", ".join(
                f"{name} is {expected.get(name)!r} and {theirs.get(name)!r}" for name in different[:_NUM_NAMED]
            )
            raise UserError(
                f"{key} {model!r} prepares images in another way than actor.model {config.actor.model!r}"
                f" ({named}{', ...' if len(different) > _NUM_NAMED else ''}), and a run prepares them once for all"
                " models: choose one of the actor's family and size of patches, or copy the actor's processor files"
                " to its folder if it was trained with them"
            )


def _models_beside(config: Config) -> dict[str, str]:
    """Return the models that see what the policy sees, by the options that name them."""
    models: dict[str, str | None] = {}
    if has_reward_model(config):
        models["reward.model"] = config.reward.model
    if has_critic(config):
        models["critic.model"] = critic_model(config)
    if has_reference(config):
        models["reference.model"] = config.reference.model
        models |= {f"reference.teachers.{name}": model for name, model in config.reference.teachers.items()}
    return {key: model for key, model in models.items() if model is not None}


def reward_scale(config: Config) -> tuple[float, float] | None:
    """Return mean and deviation of the reward model's scores from its config.json; None if they are not needed."""
    from transformers import AutoConfig

    if not config.reward.normalize:
        return None
    model = config.reward.model
    model_config = AutoConfig.from_pretrained(model, trust_remote_code=config.trust_remote_code)
    mean, std = getattr(model_config, "mean", None), getattr(model_config, "std", None)
    if isinstance(mean, int | float) and isinstance(std, int | float) and std > 0:
        return float(mean), float(std)
    raise UserError(
        f"reward.normalize: the config.json of reward.model {model!r} has mean {mean} and std {std}: it needs the mean"
        " of the model's scores and their deviation, above 0, as its training leaves them there; add them, or set"
        " reward.normalize to false"
    )


def _check_reward_model(config: Config, tokenizer: Any) -> None:
    model = config.reward.model
    assert model is not None
    theirs = tokenizer_of(config, "reward.model", model)
    if config.reward.retokenize:
        return
    difference = _difference(tokenizer, theirs) or _other_ends(tokenizer, theirs)
    if difference is not None:
        raise UserError(
            f"reward.model {model!r} cannot read the tokens of actor.model {config.actor.model!r}: {difference}; choose"
            " a reward model with the actor's tokenizer, or set reward.retokenize to true to give it the text in"
            " tokens of its own"
        )


def _check_critic(config: Config, tokenizer: Any) -> None:
    model = critic_model(config)
    key = "critic.model" if config.critic.model is not None else "critic.model (unset: reward.model)"
    difference = _difference(tokenizer, tokenizer_of(config, key, model))
    if difference is not None:
        raise UserError(
            f"{key} {model!r} cannot read the tokens of actor.model {config.actor.model!r}: {difference}; a critic"
            " gives a value for each of the actor's tokens: set critic.model to the actor's checkpoint, or to another"
            " with its tokenizer"
        )


def _check_reference(config: Config, tokenizer: Any, key: str, model: str) -> None:
    difference = _difference(tokenizer, tokenizer_of(config, key, model))
    if difference is not None:
        raise UserError(
            f"{key} {model!r} cannot read the tokens of actor.model {config.actor.model!r}: {difference}; a"
            " KL compares log-probs of the same tokens: choose a reference with the actor's tokenizer"
        )


def tokenizer_of(config: Config, key: str, model: str) -> Any:
    """Load the tokenizer of a model beside the policy. key: the option that names it."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{key} {model!r}: no tokenizer there, so nothing says which tokens it reads: save the tokenizer it was"
            f" trained with beside it ({error})"
        ) from None


def _difference(ours: Any, theirs: Any) -> str | None:
    """Describe how two vocabularies differ; None if every token has the same id."""
    mine: Mapping[str, int] = ours.get_vocab()
    other: Mapping[str, int] = theirs.get_vocab()
    if mine == other:
        return None
    changed = [token for token in sorted(mine, key=mine.__getitem__) if other.get(token) != mine[token]]
    changed += [token for token in sorted(other, key=other.__getitem__) if token not in mine]
    named = ", ".join(f"{t!r} is {_number(mine, t)} and {_number(other, t)}" for t in changed[:_NUM_NAMED])
    return f"{len(changed):,} tokens differ ({named}{', ...' if len(changed) > _NUM_NAMED else ''})"


def _other_ends(ours: Any, theirs: Any) -> str | None:
    for name in ("bos_token", "eos_token"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            return f"the {name} is {mine!r} and {other!r}"
    return None


def _number(vocabulary: Mapping[str, int], token: str) -> str:
    return str(vocabulary[token]) if token in vocabulary else "absent"
