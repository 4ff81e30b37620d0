"""Tokenizer and data of a run, read and checked before any model loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hotseat.agents.environments.agent import check_environment, environment_rows
from hotseat.config import Config
from hotseat.config.chat_template import chat_template_text
from hotseat.config.images import filler_image, has_images, image_folder, largest_image
from hotseat.config.resolved import judge_length, prompt_limit, prompt_max_length
from hotseat.config.roles import (
    has_agent,
    has_critic,
    has_judge_engine,
    has_reference,
    has_reward_model,
    has_simulator,
    task_numbers,
)
from hotseat.config.schema import DataConfig
from hotseat.data import PairReport, Row, check_lost, columns_of, load_rows, make_examples, make_pairs, make_prompts
from hotseat.data.images import ImageStore, load_processor, prepare_rows, processor_template
from hotseat.errors import UnsupportedError, UserError
from hotseat.loop.setup.refusals import judge_length_problem, length_problem
from hotseat.loop.setup.reward_columns import check_columns, keeps_columns
from hotseat.loop.setup.settings import environment_settings, image_limits
from hotseat.loop.setup.value_models import critic_model, tokenizer_of
from hotseat.loop.workers.objectives import Objective, RewardModelObjective, SftObjective
from hotseat.loop.workers.preferences import PreferenceObjective, PreferenceSettings
from hotseat.loop.workers.simulation import EVAL_SEED, simulation_prompts
from hotseat.registry.engines import engine_entry
from hotseat.types import Prompt
from hotseat.vision import sees_images

Made = TypeVar("Made")  # prompts, examples or pairs, with a report
_TASK_LABEL = "label"  # column for the numbers of an environment's tasks


def load_tokenizer(config: Config) -> Any:
    from transformers import AutoTokenizer

    assert config.actor.model is not None
    try:
        return AutoTokenizer.from_pretrained(config.actor.model, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"actor.model {config.actor.model!r}: no tokenizer there: {error}") from None


def check_models(config: Config) -> None:
    """Raise if a model cannot do what the run needs, as far as its config shows."""
    assert config.actor.model is not None
    is_value = config.task == "rm"
    aux_loss = config.algorithm.aux_loss_coef
    _check_model(config, "actor.model", config.actor.model, is_value=is_value, is_trained=True, aux_loss=aux_loss)
    if has_critic(config):
        _check_model(config, "critic.model", critic_model(config), is_value=True, is_trained=True)
    if has_reference(config) and config.reference.model is not None:
        _check_model(config, "reference.model", config.reference.model)
    if has_reference(config):
        for name, model in config.reference.teachers.items():
            _check_model(config, f"reference.teachers.{name}", model)
    if has_reward_model(config) and config.reward.model is not None:
        _check_model(config, "reward.model", config.reward.model, is_value=True)
    if has_judge_engine(config):
        _check_judge(config)


def _check_judge(config: Config) -> None:
    """Raise if the judge's engine cannot run its model."""
    from transformers import AutoConfig

    model, length = config.reward.judge.model, judge_length(config)
    assert model is not None
    try:
        model_config = AutoConfig.from_pretrained(model, trust_remote_code=config.trust_remote_code)
        _check_engine(config.reward.judge.engine.kind, length, model_config)
    except UserError as error:
        raise UserError(f"reward.judge.model {model!r}: {error}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"reward.judge.model {model!r}: no model there: {error}") from None
    if (problem := judge_length_problem(config, model_config.to_dict())) is not None:
        raise UserError(f"reward.judge.engine.max_length: {problem}")
    judge_eos_token_ids(config)


def check_teachers(config: Config, prompts: Sequence[Prompt]) -> None:
    """Raise if a prompt does not name its teacher, where each has one."""
    teachers = config.reference.teachers
    if not teachers or config.reference.teacher_weights:
        return
    without = Counter(prompt.source for prompt in prompts if prompt.source not in teachers)
    if without:
        named = ", ".join(f"{repr(source) if source else 'none'} ({count:,})" for source, count in without.items())
        raise UserError(
            f"reference.teachers: {sum(without.values()):,} of {len(prompts):,} prompts name no teacher in their column"
            f" datasource: {named}; teachers are {', '.join(teachers)}. Correct the rows, or set"
            " reference.teacher_weights, by which all teach every prompt"
        )


def _check_model(
    config: Config, key: str, model: str, *, is_value: bool = False, is_trained: bool = False, aux_loss: float = 0.0
) -> None:
    from transformers import AutoConfig

    from hotseat.train.liger import check_liger
    from hotseat.train.lora import check_language_targets, check_targets
    from hotseat.train.models import check_fit, check_length, check_stored_head, check_value_head

    try:
        model_config = AutoConfig.from_pretrained(model, trust_remote_code=config.trust_remote_code)
        _check_sight(config, model_config)
        check_fit(model_config, config.train.sequence_parallel_size, config.train.tensor_parallel_size, aux_loss)
        check_length(model_config, config.data.max_length)
        if (problem := length_problem(config, key, model, model_config.to_dict())) is not None:
            raise UserError(f"data.max_length: {problem}")
        if key == "actor.model" and config.task == "rl":
            rollout = config.rollout
            _check_engine(rollout.engine, config.data.max_length, model_config, rollout.tensor_parallel_size)
            if rollout.quantization is not None:
                _check_quantisation(model_config)
        if config.train.liger_kernel:
            check_liger(model_config)
        if is_value:
            check_value_head(model_config)
        if is_value and not is_trained:
            check_stored_head(Path(model), model_config, config.reward.value_head_prefix)
        lora = config.train.lora
        if lora.rank > 0 and is_trained:
            check_targets(model, lora.target_modules, "value" if is_value else "policy", config.trust_remote_code)
        if key == "actor.model" and has_images(config) and config.rollout.lora_sync == "adapter":
            check_language_targets(model, lora.target_modules, config.trust_remote_code)
    except UserError as error:
        raise UserError(f"{key} {model!r}: {error}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{key} {model!r}: no model there: {error}") from None


def _check_sight(config: Config, model_config: Any) -> None:
    """Raise if a run has images and a model sees none, or the other way round."""
    name, has_sight = type(model_config).__name__.removesuffix("Config"), sees_images(model_config)
    key = "data.image_key" if config.data.image_key is not None else "env.images"
    if has_images(config) and not has_sight:
        raise UserError(f"{name} sees no images here, and {key} is set: choose a model that does, or unset it")
    if not has_images(config) and has_sight:
        key = "env.images" if has_simulator(config) else "data.image_key"
        raise UserError(f"{name} sees images, and the run has none: set {key}, or choose a model of text alone")


def _check_engine(kind: str, max_length: int, model_config: Any, tensor_parallel_size: int = 1) -> None:
    """Raise if an engine of this kind cannot run a model of this config."""
    import torch

    from hotseat.rollout.kinds import engine_kind

    engine_kind(kind).check_model(model_config, max_length, tensor_parallel_size, not torch.cuda.is_available())


def _check_quantisation(model_config: Any) -> None:
    """Raise if the weights of a model of this config cannot be pushed to engines that keep them in 8 bits."""
    text = model_config.get_text_config()
    if any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        name = type(model_config).__name__.removesuffix("Config")
        raise UnsupportedError(
            f"rollout.quantization is fp8, and {name} has experts, which it is not built for: unset it"
        )


def eos_token_ids(config: Config, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end an answer: the tokenizer's, and those of the model's generation config."""
    assert config.actor.model is not None
    return _eos_token_ids("actor.model", config.actor.model, tokenizer)


def judge_eos_token_ids(config: Config) -> tuple[int, ...]:
    """Return the tokens that end what the judge writes. Raises if its tokenizer cannot be loaded."""
    model = config.reward.judge.model
    assert model is not None
    return _eos_token_ids("reward.judge.model", model, tokenizer_of(config, "reward.judge.model", model))


def _eos_token_ids(key: str, model: str, tokenizer: Any) -> tuple[int, ...]:
    from transformers import GenerationConfig

    token_ids = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    try:
        more = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # a model need not have one
        more = None
    token_ids |= set(more) if isinstance(more, list) else {more} if more is not None else set()
    if not token_ids:
        raise UserError(f"{key} {model!r}: its tokenizer has no end-of-sequence token; set eos_token")
    return tuple(sorted(token_ids))


def rl_prompts(config: Config, tokenizer: Any) -> tuple[list[Prompt], list[Prompt], list[str]]:
    """Return (prompts to learn from, prompts to evaluate on, notes for the user)."""
    if has_simulator(config):
        return _simulated(config, tokenizer)
    environment = environment_settings(config)
    if environment is not None and task_numbers(config.data.path) is None:
        check_environment(environment, config.agent.pass_env)
    (prompts, report), evaluation = _read(config, lambda rows: _prompts(config, tokenizer, rows))
    notes = [_described("prompts", report), *_lost(config, report, evaluation)]
    check_columns(config, prompts)
    if evaluation is None:
        return prompts, [], notes
    check_columns(config, evaluation[0], is_evaluation=True)
    return prompts, evaluation[0], [*notes, _described("evaluation prompts", evaluation[1])]


def _simulated(config: Config, tokenizer: Any) -> tuple[list[Prompt], list[Prompt], list[str]]:
    """Return the tasks and seeds of a simulator as prompts."""
    from hotseat.loop.setup.settings import simulation_settings

    env, settings = config.env, simulation_settings(config)
    if env.images:
        _image_store(config, tokenizer).write_filler(filler_image(config))
    ends = range(env.num_seeds), range(EVAL_SEED, EVAL_SEED + env.eval_seeds)
    prompts, evaluation = simulation_prompts(settings, tokenizer, config.data.max_length, ends)
    tasks = len({prompt.source for prompt in prompts})
    note = f"{tasks} {'task' if tasks == 1 else 'tasks'} of {env.path}, {env.num_seeds:,} seeds each"
    return prompts, evaluation, [note + (f", {env.eval_seeds:,} held out" if env.eval_seeds else "")]


def prompts_alone(
    config: Config, tokenizer: Any, *, is_evaluation: bool, first_row: int = 0
) -> tuple[list[Prompt], list[str]]:
    """Return the prompts of `data`, or of `eval`, and notes for the user, where nothing is trained.

    first_row: rows before it are left out.
    """
    data, evaluation = config.data, config.eval
    section = evaluation if is_evaluation else data
    assert section.path is not None
    rows = _rows(config, section.path, section.split, data.probs, section.max_samples)
    if first_row >= len(rows):
        raise UserError(f"{section.path} has {len(rows):,} rows, none from row {first_row:,} on")
    prompts, report = _prompts(config, tokenizer, rows[first_row:])
    check_columns(config, prompts)
    return prompts, [_described("prompts", report), *_lost(config, report, None)]


@dataclass(frozen=True)
class SupervisedData:
    """Objective and data of a supervised run."""

    objective: Objective[Any]
    items: list[Any]
    held_out: list[Any]
    notes: list[str]  # for the user


def supervised(config: Config, tokenizer: Any) -> SupervisedData:
    """Read the data of a supervised task, and make its objective."""
    makers = {"sft": _sft_data, "rm": _reward_model_data, "dpo": _preference_data}
    return makers[config.task](config, tokenizer)


def _sft_data(config: Config, tokenizer: Any) -> SupervisedData:
    (examples, report), evaluation = _read(config, lambda rows: _examples(config, tokenizer, rows))
    notes = [
        f"{report.num_examples:,} examples, {report.num_learned_tokens:,} tokens to learn"
        f" ({report.num_truncated:,} truncated, {report.num_dropped_no_answer:,} dropped without an answer)",
        *_lost(config, report, evaluation),
    ]
    return SupervisedData(SftObjective(), examples, [] if evaluation is None else evaluation[0], notes)


def _reward_model_data(config: Config, tokenizer: Any) -> SupervisedData:
    (pairs, report), evaluation = _read(config, lambda rows: _pairs(config, tokenizer, rows))
    lost = _lost(config, report, evaluation)
    section = config.algorithm.reward_modelling
    if section.margin and not any(pair.margin for pair in pairs):
        raise UserError(
            "algorithm.reward_modelling.margin is true, but no row of data.path has a number other than 0 under"
            " 'margin': add that column, or leave the option unset"
        )
    pad_token_id, notes = _pad_token(tokenizer)
    objective = RewardModelObjective(section.loss, section.margin, pad_token_id)
    if evaluation is None:
        without = "no pairs are held out (eval.path): the model's mean and std are of pairs it learned from"
        return SupervisedData(objective, pairs, [], [_described_pairs("pairs", report), *lost, without, *notes])
    counts = [_described_pairs("pairs", report), _described_pairs("held-out pairs", evaluation[1]), *lost]
    return SupervisedData(objective, pairs, evaluation[0], counts + notes)


def _preference_data(config: Config, tokenizer: Any) -> SupervisedData:
    (pairs, report), evaluation = _read(config, lambda rows: _pairs(config, tokenizer, rows))
    section = config.algorithm.dpo
    objective = PreferenceObjective(
        PreferenceSettings(
            kind=section.loss,
            beta=section.beta,
            label_smoothing=section.label_smoothing,
            is_length_normalised=section.length_normalised,
            gamma=section.gamma,
            nll_coefficient=section.nll_coef,
        )
    )
    notes = [_described_pairs("pairs", report)]
    if evaluation is not None:
        notes.append(_described_pairs("held-out pairs", evaluation[1]))
    notes += _lost(config, report, evaluation)
    return SupervisedData(objective, pairs, [] if evaluation is None else evaluation[0], notes)


def _pad_token(tokenizer: Any) -> tuple[int, list[str]]:
    """Return the pad token with which transformers scores batches of the exported model, and notes for the user.

    transformers reads a reward at the last token that is not padding. That is the end of the sequence if the pad token
    differs from the end token. A tokenizer without such a pad token gets one of its other special tokens.
    """
    end = tokenizer.eos_token_id
    if tokenizer.pad_token_id not in (None, end):
        return tokenizer.pad_token_id, []
    special = (index for index, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special)
    candidates = (tokenizer.unk_token_id, tokenizer.bos_token_id, *special)
    pad_token_id = next((index for index in candidates if index not in (None, end)), None)
    problem = "has no pad token, without which transformers scores no batches"
    if tokenizer.pad_token_id is not None:
        problem = "has its end token as pad token, so that transformers would read rewards a token early"
    if pad_token_id is None:
        # Not set in the tokenizer: as a special token, an ordinary one would be split from texts differently.
        pad_token_id = 0 if end != 0 else 1
        how = f"pad batches with token id {pad_token_id}, which the exported config.json names"
    else:
        tokenizer.pad_token_id = pad_token_id
        how = f"{tokenizer.pad_token!r} is exported as such"
    return pad_token_id, [f"the tokenizer {problem}: {how}"]


def _read(config: Config, make: Callable[[list[Row]], Made]) -> tuple[Made, Made | None]:
    """Read the rows to learn from and those to evaluate on, and return what `make` makes of each."""
    data, evaluation = config.data, config.eval
    assert data.path is not None
    learned = _rows(config, data.path, data.split, data.probs, data.max_samples)
    if evaluation.path is None:
        return make(learned), None
    probs = data.probs if evaluation.path == data.path else None
    return make(learned), make(_rows(config, evaluation.path, evaluation.split, probs, evaluation.max_samples))


def _rows(config: Config, path: str, split: str, probs: str | None, max_samples: int | None) -> list[Row]:
    """Read rows from files, from the hub, or from the run's environment, whose tasks have their numbers as labels."""
    numbers = task_numbers(path)
    if numbers is None:
        return load_rows(path, split=split, probs=probs, seed=config.seed, max_samples=max_samples)
    settings = environment_settings(config)
    assert settings is not None, "checked with the config"
    first, last = numbers
    last = last if max_samples is None else min(last, first + max_samples - 1)
    tasks = environment_rows(settings, first, last, config.agent.pass_env)
    keys = {"text": config.data.input_key, "label": _label_key(config) or _TASK_LABEL}
    return [
        Row({keys[name]: text for name, text in task.items()}, str(settings), first + at, has_line=False)
        for at, task in enumerate(tasks)
    ]


def _label_key(config: Config) -> str | None:
    """Return the column of labels. Tasks of an environment always have them."""
    if config.data.label_key is None and task_numbers(config.data.path) is not None:
        return _TASK_LABEL
    return config.data.label_key


def _lost(config: Config, report: Any, evaluation: Any) -> list[str]:
    """Return warnings about rows that are too long, to learn from and to evaluate on. Raises if too many are."""
    limit = f"data.max_length {config.data.max_length}"
    fix = "raise data.max_length"
    if config.task == "rl":
        limit, fix = prompt_limit(config)
    notes = []
    for source, each in (("data.path", report), ("eval.path", None if evaluation is None else evaluation[1])):
        if each is not None:
            notes += check_lost(
                each.lost,
                each.num_rows,
                source=source,
                limit=limit,
                fix=fix,
                max_fraction=config.data.max_lost_fraction,
                warn_above=DataConfig().max_lost_fraction,
            )
    return notes


def _prompts(config: Config, tokenizer: Any, rows: list[Row]) -> Any:
    data = config.data
    return make_prompts(
        _with_images(config, tokenizer, rows, data.input_key),
        tokenizer,
        input_key=data.input_key,
        label_key=_label_key(config),
        input_template=data.input_template,
        apply_chat_template=data.apply_chat_template,
        chat_template=_chat_template(config, tokenizer),
        prompt_max_length=prompt_max_length(config),
        limit=prompt_limit(config),
        image_key=data.image_key,
        columns=columns_of(rows, data.image_key) if keeps_columns(config) else None,
    )


def _chat_template(config: Config, tokenizer: Any) -> str | None:
    """Return the template to use instead of the tokenizer's; None: none. Some models that see have one elsewhere."""
    data = config.data
    is_elsewhere = data.image_key is not None and data.apply_chat_template and not tokenizer.chat_template
    if data.chat_template is not None or not is_elsewhere:
        return chat_template_text(data.chat_template)
    assert config.actor.model is not None
    return processor_template(config.actor.model)


def _with_images(config: Config, tokenizer: Any, rows: list[Row], *input_keys: str) -> list[Row]:
    """Return rows with their images read, checked and prepared, if the run has images.

    input_keys: columns of the prompts, or of whole conversations.
    """
    data = config.data
    if data.image_key is None:
        return rows
    store = _image_store(config, tokenizer)
    store.write_filler(filler_image(config))
    prepared = prepare_rows(rows, store, data.image_key, *input_keys, is_chat=data.apply_chat_template)
    if not store.num_images:
        raise UserError(f"data.image_key {data.image_key!r}: no row has an image: correct it, or leave it unset")
    if config.task == "rl" and engine_entry(config.rollout.engine).is_sized_by_images:
        # What an environment shows later may be larger than all images of the data.
        others = has_agent(config)
        store.write_largest(largest_image(config), data.max_length, with_others=others)
    return prepared


def _image_store(config: Config, tokenizer: Any) -> ImageStore:
    assert config.actor.model is not None
    processor = load_processor(config.actor.model, tokenizer, config.trust_remote_code)
    return ImageStore(image_folder(config), processor, image_limits(config))


def _examples(config: Config, tokenizer: Any, rows: list[Row]) -> Any:
    data = config.data
    return make_examples(
        _with_images(config, tokenizer, rows, data.input_key),
        tokenizer,
        input_key=data.input_key,
        output_key=data.output_key,
        input_template=data.input_template,
        apply_chat_template=data.apply_chat_template,
        chat_template=_chat_template(config, tokenizer),
        multiturn=data.multiturn,
        pretrain_mode=data.pretrain_mode,
        max_length=data.max_length,
        image_key=data.image_key,
    )


def _pairs(config: Config, tokenizer: Any, rows: list[Row]) -> Any:
    data = config.data
    keys = (data.chosen_key, data.rejected_key) if data.prompt_key is None else (data.prompt_key,)
    return make_pairs(
        _with_images(config, tokenizer, rows, *keys),
        tokenizer,
        chosen_key=data.chosen_key,
        rejected_key=data.rejected_key,
        prompt_key=data.prompt_key,
        input_template=data.input_template,
        apply_chat_template=data.apply_chat_template,
        chat_template=_chat_template(config, tokenizer),
        max_length=data.max_length,
        # A reward is read at the end token. What is learned token by token must not end where it was cut.
        keep_end=config.task == "rm",
        is_preference=config.task == "dpo",
        image_key=data.image_key,
    )


def _described_pairs(what: str, report: PairReport) -> str:
    return (
        f"{report.num_pairs:,} {what} ({report.num_truncated:,} truncated, {report.num_dropped_no_answer:,} dropped"
        f" without an answer, {report.num_dropped_identical:,} dropped with the same answer twice)"
    )


def _described(what: str, report: Any) -> str:
    dropped = f", {report.num_dropped_too_long:,} dropped as too long" if report.num_dropped_too_long else ""
    return f"{report.num_prompts:,} {what}{dropped}"
