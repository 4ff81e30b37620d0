"""Tokenizer and data of a run, read and checked before any model loads."""

from __future__ import annotations

from typing import Any

from hotseat.config import Config
from hotseat.data import Example, Row, load_rows, make_examples, make_prompts
from hotseat.errors import UserError
from hotseat.loop import settings
from hotseat.types import Prompt


def load_tokenizer(config: Config) -> Any:
    from transformers import AutoTokenizer

    assert config.actor.model is not None
    try:
        return AutoTokenizer.from_pretrained(config.actor.model, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"actor.model {config.actor.model!r}: no tokenizer there: {error}") from None


def check_model(config: Config) -> None:
    """Whether the model can do what is asked of its training, as far as its config tells."""
    from transformers import AutoConfig

    from hotseat.train.models import check_fit

    assert config.actor.model is not None
    found = AutoConfig.from_pretrained(config.actor.model, trust_remote_code=config.trust_remote_code)
    check_fit(found, config.train.sequence_parallel_size, config.algorithm.aux_loss_coef)


def eos_token_ids(config: Config, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer: the tokenizer's, and what the model's generation config adds."""
    from transformers import GenerationConfig

    found = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    assert config.actor.model is not None
    try:
        more = GenerationConfig.from_pretrained(config.actor.model).eos_token_id
    except OSError:  # a model need not have one
        more = None
    found |= set(more) if isinstance(more, list) else {more} if more is not None else set()
    if not found:
        raise UserError(
            f"actor.model {config.actor.model!r}: its tokenizer has no end-of-sequence token; set eos_token"
        )
    return tuple(sorted(found))


def rl_prompts(config: Config, tokenizer: Any) -> tuple[list[Prompt], list[Prompt], list[str]]:
    """(prompts to learn from, prompts to evaluate on, what to tell the user)."""
    assert config.data.path is not None
    prompts, report = _prompts(config, tokenizer, config.data.path, config.data.split, config.data.max_samples)
    notes = [_described("prompts", report)]
    held_out: list[Prompt] = []
    if config.eval.path is not None:
        held_out, report = _prompts(config, tokenizer, config.eval.path, config.eval.split, config.eval.max_samples)
        notes.append(_described("evaluation prompts", report))
    return prompts, held_out, notes


def sft_examples(config: Config, tokenizer: Any) -> tuple[list[Example], list[Example], list[str]]:
    """(examples, held-out examples, what to tell the user)."""
    assert config.data.path is not None
    examples, report = _examples(config, tokenizer, config.data.path, config.data.split, config.data.max_samples)
    notes = [
        f"{report.num_examples:,} examples, {report.num_learned_tokens:,} tokens to learn"
        f" ({report.num_truncated:,} truncated, {report.num_dropped_no_answer:,} dropped without an answer)"
    ]
    held_out: list[Example] = []
    if config.eval.path is not None:
        held_out, _ = _examples(config, tokenizer, config.eval.path, config.eval.split, config.eval.max_samples)
    return examples, held_out, notes


def _rows(config: Config, path: str, split: str, max_samples: int | None) -> list[Row]:
    probs = config.data.probs if path == config.data.path else None
    return load_rows(path, split=split, probs=probs, seed=config.seed, max_samples=max_samples)


def _prompts(config: Config, tokenizer: Any, path: str, split: str, max_samples: int | None) -> Any:
    data = config.data
    rows = _rows(config, path, split, max_samples)
    return make_prompts(
        rows,
        tokenizer,
        input_key=data.input_key,
        label_key=data.label_key,
        input_template=data.input_template,
        apply_chat_template=data.apply_chat_template,
        chat_template=data.chat_template,
        prompt_max_length=settings.prompt_max_length(config),
    )


def _examples(config: Config, tokenizer: Any, path: str, split: str, max_samples: int | None) -> Any:
    data = config.data
    rows = _rows(config, path, split, max_samples)
    return make_examples(
        rows,
        tokenizer,
        input_key=data.input_key,
        output_key=data.output_key,
        input_template=data.input_template,
        apply_chat_template=data.apply_chat_template,
        chat_template=data.chat_template,
        multiturn=data.multiturn,
        pretrain_mode=data.pretrain_mode,
        max_length=data.max_length,
    )


def _described(what: str, report: Any) -> str:
    dropped = f", {report.num_dropped_too_long:,} dropped as too long" if report.num_dropped_too_long else ""
    return f"{report.num_prompts:,} {what}{dropped}"
