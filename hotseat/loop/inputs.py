"""Reads tokenizer and data of a run before any model loads, between the checks that need them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hotseat.agents.environments.environment_agent import check_environment, environment_rows
from hotseat.checks.pipeline import DATA, LAUNCHED_RANKS, MODELS, PLACEMENT, TOKENIZERS, TRAINING
from hotseat.checks.plans import is_cluster_there
from hotseat.checks.reward_columns import keeps_columns, left_out_notes
from hotseat.checks.stage import DataContext, PlanContext, RanksContext, TokenizerContext, TrainingContext, run_checks
from hotseat.config import Config
from hotseat.config.batches import BatchAlgebra, batch_algebra, left_over_note
from hotseat.config.chat_template import chat_template_text
from hotseat.config.image_paths import filler_image, image_folder, largest_image
from hotseat.config.precision import with_dtype
from hotseat.config.presence import has_agent, has_critic, has_simulator, task_numbers
from hotseat.config.resolved import prompt_limit, prompt_max_length, source_of
from hotseat.config.schema.data_options import DataConfig, EvaluationSetConfig
from hotseat.data import Row, RowReport, check_lost, columns_of, load_rows, make_examples, make_pairs, make_prompts
from hotseat.data.images import ImageStore, load_processor, prepare_rows, processor_template
from hotseat.errors import TooFewDevicesError, UserError
from hotseat.extensions import load
from hotseat.loop.settings.rollout_settings import environment_settings, image_limits, simulation_settings
from hotseat.loop.settings.training_settings import critic_options, train_options
from hotseat.loop.workers.objectives import Objective, RewardModelObjective, SftObjective
from hotseat.loop.workers.observations import EVAL_SEED, simulation_prompts
from hotseat.loop.workers.preferences import PreferenceObjective
from hotseat.machine import has_gpu
from hotseat.placement import Inventory, Plan
from hotseat.planning.config_plan import make_plan, num_data_parallel
from hotseat.registry.engines import engine_entry
from hotseat.types import Prompt

MAX_LOGICAL_DEVICES = 64
_TASK_LABEL = "label"  # column for the numbers of an environment's tasks


@dataclass(frozen=True)
class Inputs:
    """Inputs that every run reads before it starts."""

    tokenizer: Any
    rows: Sequence[Any]  # prompts, examples or pairs to learn from, in the order of the file
    notes: list[str]  # warnings and facts for the journal
    algebra: BatchAlgebra


@dataclass(frozen=True)
class RlInputs(Inputs):
    """Inputs of a reinforcement run."""

    eval_prompts: list[Prompt]
    plan: Plan  # for the devices of this machine, or those that the config names
    eval_sets: dict[str, range]  # indices of the evaluation prompts of each named set


@dataclass(frozen=True)
class SupervisedInputs(Inputs):
    """Inputs of a supervised run."""

    data: SupervisedData
    plan: Plan | None  # None: a launcher has placed the ranks


def rl_inputs(config: Config) -> RlInputs:
    """Read tokenizer and data of a reinforcement run. Raises for everything that would stop it."""
    # Placement and batch sizes first: they need neither tokenizer nor data.
    plan, num_ranks = dry_plan(config)
    batch_algebra(config, num_ranks)
    run_checks(PlanContext(config=config, plan=plan), PLACEMENT)
    tokenizer = load_tokenizer(config)
    prompts, eval_prompts, notes, sets = rl_prompts(config, tokenizer)
    run_checks(DataContext(config=config, prompts=prompts, eval_prompts=eval_prompts), DATA)
    algebra = batch_algebra(config, num_ranks, len(prompts))
    _check_training(config, algebra)
    notes += _left_over(config, algebra)
    return RlInputs(tokenizer, prompts, notes, algebra, eval_prompts, plan, sets)


def supervised_inputs(config: Config, num_launched: int | None = None) -> SupervisedInputs:
    """Read tokenizer and data of a supervised run. Raises for everything that would stop it.

    num_launched: number of ranks that a launcher started; None: the run starts its ranks itself.
    """
    tokenizer = load_tokenizer(config)
    data = supervised(config, tokenizer)
    plan = None
    if num_launched is None:
        plan, num_ranks = dry_plan(config)
        run_checks(PlanContext(config=config, plan=plan), PLACEMENT)
    else:
        run_checks(RanksContext(config=config, num_launched=num_launched), LAUNCHED_RANKS)
        num_ranks = num_launched // config.train.num_model_parallel
    algebra = batch_algebra(config, num_ranks, len(data.items))
    _check_training(config, algebra)
    notes = [*data.notes, *_left_over(config, algebra)]
    return SupervisedInputs(tokenizer, data.items, notes, algebra, data, plan)


def _check_training(config: Config, algebra: BatchAlgebra) -> None:
    """Raise now for options that ranks would otherwise refuse only after engines have loaded their model."""
    assert algebra.schedule_length is not None
    checked = with_dtype(config, has_gpu() or is_cluster_there(config))
    options = [train_options(checked, algebra.schedule_length)]
    if has_critic(config):
        options.append(critic_options(checked, algebra.schedule_length))
    run_checks(TrainingContext(config=config, options=options, num_steps=algebra.num_steps or 0), TRAINING)


def _left_over(config: Config, algebra: BatchAlgebra) -> list[str]:
    """Return the note on rows that are not learned from; a user's sampler chooses rows without an end."""
    note = None if config.data.sampler is not None else left_over_note(algebra, config)
    return [] if note is None else [note]


def dry_plan(config: Config) -> tuple[Plan, int]:
    """Plan without a cluster; return the number of data-parallel ranks too, by which batches have to divide.

    On an existing cluster the placement may stand for any number: 1 until its devices are known.
    """
    inventory = local_inventory(config)
    plan = make_plan(config, inventory)
    return plan, 1 if inventory is None else num_data_parallel(config, plan)


def local_inventory(config: Config) -> Inventory | None:
    """Return the devices to plan for before a cluster is connected: those of the config, or of this machine.

    None if an existing cluster will be used, whose devices are not known yet.
    """
    if config.cluster.inventory is not None:
        return Inventory.parse(config.cluster.inventory)
    if is_cluster_there(config):
        return None
    import torch

    if torch.cuda.is_available():
        return Inventory.parse(f"1x{torch.cuda.device_count()}")
    # Without accelerators devices are logical: one node with as many as the placement names.
    for num_devices in range(1, MAX_LOGICAL_DEVICES):
        try:
            inventory = Inventory.parse(f"1x{num_devices}")
            make_plan(config, inventory)
            return inventory
        except TooFewDevicesError:
            continue
    return Inventory.parse(f"1x{MAX_LOGICAL_DEVICES}")


def load_tokenizer(config: Config) -> Any:
    """Load the actor's tokenizer. Raises if there is none, or if a model of the run does not go with it."""
    try:
        tokenizer = source_of(config, config.actor.model).tokenizer()
    except (OSError, ValueError) as error:
        raise UserError(f"actor.model {config.actor.model!r}: no tokenizer there: {error}") from None
    run_checks(TokenizerContext(config=config, tokenizer=tokenizer), MODELS, TOKENIZERS)
    return tokenizer


def rl_prompts(config: Config, tokenizer: Any) -> tuple[list[Prompt], list[Prompt], list[str], dict[str, range]]:
    """Return (prompts to learn from, prompts to evaluate on, notes for the user, indices of each set of the second)."""
    if has_simulator(config):
        return *_simulated(config, tokenizer), {}
    environment = environment_settings(config)
    if environment is not None and task_numbers(config.data.path) is None:
        check_environment(environment, config.agent.pass_env)
    prompts, held_out, notes = _read(config, partial(_prompts, config, tokenizer), "prompts", _described)
    sources, sets = {prompt.source for prompt in held_out}, {}
    for name, section in config.eval.sets.items():
        if name in sources:
            raise UserError(f"eval.sets.{name}: rows of eval.path have that datasource, too: give it another name")
        added, report = _evaluation_set(config, tokenizer, section)
        sets[name] = range(len(held_out), len(held_out) + len(added))
        held_out += [replace(prompt, index=index) for prompt, index in zip(added, sets[name], strict=True)]
        notes += [_described(f"held-out prompts in {name}", added, report)]
        notes += _lost(config, f"eval.sets.{name}.path", report)
    return prompts, held_out, notes, sets


def _evaluation_set(config: Config, tokenizer: Any, section: EvaluationSetConfig) -> tuple[list[Prompt], RowReport]:
    """Return the prompts of a named set, and the report on them."""
    keys = {"data.input_key": section.input_key, "data.label_key": section.label_key}
    config = config.with_options({key: value for key, value in keys.items() if value is not None})
    max_samples = config.eval.max_samples if section.max_samples is None else section.max_samples
    rows = _rows(config, section.path, section.split or config.eval.split, None, max_samples)
    return _prompts(config, tokenizer, rows)


def _simulated(config: Config, tokenizer: Any) -> tuple[list[Prompt], list[Prompt], list[str]]:
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
    run_checks(DataContext(config=config, prompts=prompts), DATA)
    return prompts, [_described("prompts", prompts, report), *_lost(config, "data.path", report)]


@dataclass(frozen=True)
class SupervisedData:
    """Objective and data of a supervised run."""

    objective: Objective[Any]
    items: list[Any]
    held_out: list[Any]
    notes: list[str]  # for the user


def supervised(config: Config, tokenizer: Any) -> SupervisedData:
    """Read the data of a supervised task, and make its objective."""
    made: SupervisedData = load(config.task_entry.data)(config, tokenizer)
    return made


def sft_data(config: Config, tokenizer: Any) -> SupervisedData:
    """Read examples, and make the objective of their tokens. The other tasks have functions of this form, too."""
    return SupervisedData(
        SftObjective(), *_read(config, partial(_examples, config, tokenizer), "examples", _described_examples)
    )


def reward_model_data(config: Config, tokenizer: Any) -> SupervisedData:
    pairs, held_out, notes = _read(config, partial(_pairs, config, tokenizer), "pairs", _described_pairs)
    section = config.algorithm.reward_modelling
    if section.margin and not any(pair.margin for pair in pairs):
        raise UserError(
            "algorithm.reward_modelling.margin is true, but no row of data.path has a number other than 0 under"
            " 'margin': add that column, or leave the option unset"
        )
    pad_token_id, pad_notes = _pad_token(tokenizer)
    if not held_out:
        notes.append("no pairs are held out (eval.path): the model's mean and std are of pairs it learned from")
    objective = RewardModelObjective(section.loss, section.margin, pad_token_id)
    return SupervisedData(objective, pairs, held_out, notes + pad_notes)


def preference_data(config: Config, tokenizer: Any) -> SupervisedData:
    pairs, held_out, notes = _read(config, partial(_pairs, config, tokenizer), "pairs", _described_pairs)
    return SupervisedData(PreferenceObjective(config.algorithm.dpo), pairs, held_out, notes)


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


def _read(
    config: Config,
    make: Callable[[list[Row]], tuple[list[Any], RowReport]],
    what: str,
    describe: Callable[[str, list[Any], RowReport], str],
) -> tuple[list[Any], list[Any], list[str]]:
    """Return what `make` makes of the rows to learn from and of those that are held out, and notes for the user."""
    data, evaluation = config.data, config.eval
    assert data.path is not None
    items, report = make(_rows(config, data.path, data.split, data.probs, data.max_samples))
    if evaluation.path is None:
        return items, [], [describe(what, items, report), *_lost(config, "data.path", report)]
    probs = data.probs if evaluation.path == data.path else None
    held_out, of_held_out = make(_rows(config, evaluation.path, evaluation.split, probs, evaluation.max_samples))
    lost = [*_lost(config, "data.path", report), *_lost(config, "eval.path", of_held_out)]
    described = [describe(what, items, report), describe(f"held-out {what}", held_out, of_held_out)]
    return items, held_out, [*described, *lost]


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


def _lost(config: Config, source: str, report: RowReport) -> list[str]:
    """Return warnings about rows that are too long, and columns that functions cannot get. Raises if too many are."""
    limit, fix = f"data.max_length {config.data.max_length}", "raise data.max_length"
    if config.has_rollouts:
        limit, fix = prompt_limit(config)
    too_long = check_lost(
        report,
        source=source,
        limit=limit,
        fix=fix,
        max_fraction=config.data.max_lost_fraction,
        warn_above=DataConfig().max_lost_fraction,
    )
    return [*too_long, *left_out_notes(config, source, report.left_out)]


def _prompts(config: Config, tokenizer: Any, rows: list[Row]) -> tuple[list[Prompt], RowReport]:
    data = config.data
    columns, left_out = columns_of(rows, data.image_key) if keeps_columns(config) else (None, {})
    prompts, report = make_prompts(
        _with_images(config, tokenizer, rows, data.input_key),
        tokenizer,
        input_key=data.input_key,
        label_key=_label_key(config),
        input_template=data.input_template,
        apply_chat_template=data.apply_chat_template,
        chat_template=_chat_template(config, tokenizer),
        chat_template_kwargs=data.chat_template_kwargs,
        prompt_max_length=prompt_max_length(config),
        limit=prompt_limit(config),
        image_key=data.image_key,
        columns=columns,
        answer_key=config.algorithm.distill.answer_key,
        teacher_key=config.algorithm.distill.teacher_input_key,
    )
    return prompts, replace(report, left_out=left_out)


def _chat_template(config: Config, tokenizer: Any) -> str | None:
    """Return the template to use instead of the tokenizer's; None: none. Some VLMs have it elsewhere."""
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
    if config.has_rollouts and engine_entry(config.rollout.engine).is_sized_by_images:
        # What an environment shows later may be larger than all images of the data.
        others = has_agent(config)
        store.write_largest(largest_image(config), data.max_length, with_others=others)
    return prepared


def _image_store(config: Config, tokenizer: Any) -> ImageStore:
    processor = load_processor(source_of(config, config.actor.model), tokenizer)
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
        chat_template_kwargs=data.chat_template_kwargs,
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
        chat_template_kwargs=data.chat_template_kwargs,
        max_length=data.max_length,
        # A reward is read at the end token. What is learned token by token must not end where it was cut.
        keep_end=config.task_entry.has_scalar_head,
        is_preference=config.task_entry.compares_answers,
        image_key=data.image_key,
    )


def _described_pairs(what: str, pairs: list[Any], report: RowReport) -> str:
    return (
        f"{report.num_kept:,} {what} ({report.num_cut:,} truncated, {report.num_no_answer:,} dropped without an answer,"
        f" {report.num_identical:,} dropped with the same answer twice)"
    )


def _described_examples(what: str, examples: list[Any], report: RowReport) -> str:
    num_learned = sum(int(example.mask.sum()) for example in examples)
    return (
        f"{report.num_kept:,} {what}, {num_learned:,} tokens to learn"
        f" ({report.num_cut:,} truncated, {report.num_no_answer:,} dropped without an answer)"
    )


def _described(what: str, prompts: list[Any], report: RowReport) -> str:
    dropped = f", {report.num_lost:,} dropped as too long" if report.num_lost else ""
    return f"{report.num_kept:,} {what}{dropped}"
