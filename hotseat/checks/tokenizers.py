"""Checks that critic, reference and reward model can read the policy's tokens and pixels, and its chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hotseat.checks.stage import TokenizerContext
from hotseat.config import Config
from hotseat.config.chat_template import variables_problem
from hotseat.config.presence import has_critic, has_images, has_reference, has_reward_model
from hotseat.config.resolved import critic_model, source_of
from hotseat.errors import Problem, UserError

_NUM_NAMED = 3  # tokens in an error message
_REMEDIES = {
    "reward": "choose a reward model with the actor's tokenizer, or set reward.retokenize to true to give it the text"
    " in tokens of its own",
    "critic": "a critic gives a value for each of the actor's tokens: set critic.model to the actor's checkpoint, or to"
    " another with its tokenizer",
    "teacher": "a policy learns what a teacher says of its own tokens: choose a teacher with the actor's tokenizer, or"
    " start from an actor with the teacher's",
    "reference": "a KL compares log-probs of the same tokens: choose a reference with the actor's tokenizer",
}


def readers(context: TokenizerContext) -> Iterator[Problem]:
    """Find a critic, a reward model or a reference that reads other tokens than the policy, or takes other pixels.

    Images are prepared once for all models of a run.
    """
    config, tokenizer = context.config, context.tokenizer
    if has_reward_model(config):
        reward_scale(config)
    others = {key: model for key, model in _models_beside(config).items() if model != config.actor.model}
    for key, model in others.items():
        theirs, role = tokenizer_of(config, key, model), key.partition(".")[0]
        if role == "reward" and config.reward.retokenize:
            continue
        difference = _difference(tokenizer, theirs)
        is_teacher = role == "reference" and config.algorithm.distill.coef > 0
        if difference is None and (role == "reward" or is_teacher):
            difference = _other_ends(tokenizer, theirs)
        if difference is not None:
            yield Problem(
                "",
                f"{key} {model!r} cannot read the tokens of actor.model {config.actor.model!r}: {difference};"
                f" {_REMEDIES['teacher' if is_teacher else role]}",
            )
    if has_images(config) and others:
        yield from _images(config, tokenizer, others)


def chat_template_variables(context: TokenizerContext) -> Iterator[Problem]:
    """Find variables that the tokenizer's chat template does not have."""
    from hotseat.data.images import processor_template

    data, template = context.config.data, context.tokenizer.chat_template
    if not data.chat_template_kwargs or data.chat_template is not None:
        return
    if not template and data.image_key is not None and context.config.actor.model is not None:
        template = processor_template(context.config.actor.model)
    if template:
        texts = list(template.values()) if isinstance(template, dict) else [template]  # some have several by name
        if problem := variables_problem("\n".join(texts), data.chat_template_kwargs):
            yield Problem("data.chat_template_kwargs", problem)


def _images(config: Config, tokenizer: Any, others: Mapping[str, str]) -> Iterator[Problem]:
    """Find models beside the policy that prepare images in another way than it."""
    from hotseat.data.images import load_processor, preparation

    expected = preparation(load_processor(source_of(config, config.actor.model), tokenizer))
    for key, model in others.items():
        theirs = preparation(load_processor(source_of(config, model), tokenizer))
        different = sorted(name for name in expected | theirs if expected.get(name) != theirs.get(name))
        if different:
            named = ", ".join(
                f"{name} is {expected.get(name)!r} and {theirs.get(name)!r}" for name in different[:_NUM_NAMED]
            )
            yield Problem(
                "",
                f"{key} {model!r} prepares images in another way than actor.model {config.actor.model!r}"
                f" ({named}{', ...' if len(different) > _NUM_NAMED else ''}), and a run prepares them once for all"
                " models: choose one of the actor's family and size of patches, or copy the actor's processor files"
                " to its folder if it was trained with them",
            )


def _models_beside(config: Config) -> dict[str, str]:
    """Return the models that see what the policy sees, by the options that name them."""
    models: dict[str, str | None] = {}
    if has_reward_model(config):
        models["reward.model"] = config.reward.model
    if has_critic(config):
        unset = "" if config.critic.model is not None else " (unset: reward.model)"
        models[f"critic.model{unset}"] = critic_model(config)
    if has_reference(config):
        models["reference.model"] = config.reference.model
        models |= {f"reference.teachers.{name}": model for name, model in config.reference.teachers.items()}
    return {key: model for key, model in models.items() if model is not None}


def reward_scale(config: Config) -> tuple[float, float] | None:
    """Return mean and deviation of the reward model's scores from its config.json; None if they are not needed."""
    if not config.reward.normalize:
        return None
    model = config.reward.model
    model_config = source_of(config, model).config()
    mean, std = getattr(model_config, "mean", None), getattr(model_config, "std", None)
    if isinstance(mean, int | float) and isinstance(std, int | float) and std > 0:
        return float(mean), float(std)
    raise UserError(
        f"reward.normalize: the config.json of reward.model {model!r} has mean {mean} and std {std}: it needs the mean"
        " of the model's scores and their deviation, above 0, as its training leaves them there; add them, or set"
        " reward.normalize to false"
    )


def tokenizer_of(config: Config, key: str, model: str) -> Any:
    """Load the tokenizer of a model beside the policy. key: the option that names it."""
    try:
        return source_of(config, model).tokenizer()
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
