"""Prompts, examples and pairs; evaluation."""

from __future__ import annotations

from typing import Annotated, Any

from hotseat.config import conditions as when
from hotseat.config.annotations import PAIRS, RL, RL_OR_SFT, SFT, MayChange
from hotseat.config.schema.reward_options import GraderConfig
from hotseat.config.schema.section import Amount, Fraction, FunctionPath, NotNegative, Positive, Section


class DataConfig(Section):
    path: Annotated[str | None, when.PROMPTS] = None
    """File, saved data set or hub name; several joined by commas."""
    probs: Annotated[str | None, when.PATH] = None
    """Sampling probability of each part of `path`, by commas; a pass ends when all are used up, shorter ones repeat."""
    split: Annotated[str, when.PATH] = "train"
    """Split to read."""
    max_samples: Annotated[Positive | None, when.PROMPTS] = None
    """Rows used at most."""
    input_key: Annotated[str, RL_OR_SFT, when.PROMPTS] = "input"
    """Column of the prompt."""
    label_key: Annotated[str | None, RL, when.PROMPTS] = None
    """Column passed to the reward as label."""
    output_key: Annotated[str | None, SFT] = None
    """Column of the answer (sft)."""
    chosen_key: Annotated[str, PAIRS] = "chosen"
    """Column of the preferred answer (rm, dpo)."""
    rejected_key: Annotated[str, PAIRS] = "rejected"
    """Column of the other answer (rm, dpo)."""
    prompt_key: Annotated[str | None, PAIRS] = None
    """Column of the prompt that both answers share (rm, dpo)."""
    image_key: Annotated[str | None, when.PROMPTS] = None
    """Column of images, for vision-language models: paths, bytes, `data:` URIs, or a list of them."""
    max_images_per_prompt: Annotated[NotNegative, when.IMAGE_KEY] = 0
    """Images per prompt at most."""
    max_image_pixels: Annotated[Positive, when.IMAGE_KEY] = 2**26
    """Width times height of an image at most; larger ones are refused before they are decoded."""
    max_image_bytes: Annotated[Positive, when.IMAGE_KEY] = 2**26
    """Size of a stored image at most."""
    input_template: Annotated[str | None, when.NO_CHAT_TEMPLATE, when.PROMPTS] = None
    """Format string with one `{}` for the prompt."""
    apply_chat_template: Annotated[bool, when.PROMPTS] = False
    """Render messages with the tokenizer's chat template."""
    chat_template: Annotated[str | None, when.CHAT_TEMPLATE, when.PROMPTS] = None
    """Chat template to use instead of the tokenizer's: a Jinja template, or a file with one."""
    chat_template_kwargs: Annotated[dict[str, Any], when.CHAT_TEMPLATE, when.PROMPTS] = {}
    """Variables of the chat template wherever it is rendered, such as `{enable_thinking: false}`."""
    multiturn: Annotated[bool, SFT] = False
    """Learn from every assistant turn, not from the last one only (sft)."""
    pretrain_mode: Annotated[bool, SFT] = False
    """Learn from every token (sft)."""
    sampler: Annotated[FunctionPath | None, RL] = None
    """Custom function, `my.py:function`, that chooses each step's prompts, such as a curriculum (rl)."""
    shuffle: Annotated[bool, RL, when.PROMPTS, when.NO_SAMPLER] = True
    """Use the prompts in another order in each pass; false keeps their order in the data (rl)."""
    prompt_max_length: Annotated[Positive | None, RL, when.PROMPTS] = None
    """Longest prompt that is kept; unset: `max_length` less `rollout.max_new_tokens` if that is set, else its half."""
    max_length: Positive = 2048
    """Tokens of a whole sequence at most."""
    max_lost_fraction: Annotated[Fraction, when.PROMPTS, MayChange.LIMITS] = 0.05
    """Share of rows that length limits may drop or cut before the run refuses to start; 1 only warns."""


class EvaluationSetConfig(Section):
    path: str
    """File, saved data set or hub name, as `eval.path`."""
    split: str | None = None
    """Split to read; unset is `eval.split`."""
    max_samples: Positive | None = None
    """Rows used at most; unset is `eval.max_samples`."""
    input_key: str | None = None
    """Column of the prompt; unset is `data.input_key`."""
    label_key: str | None = None
    """Column passed to the reward as label; unset is `data.label_key`."""


class EvaluationConfig(Section):
    path: Annotated[str | None, when.PROMPTS] = None
    """Evaluation data; unset evaluates only on `sets`, if there are any; `null` also ignores the rest of `eval`."""
    sets: Annotated[dict[str, EvaluationSetConfig], RL, when.PROMPTS] = {}
    """Further evaluation data by name, such as `{gsm8k: {path: ...}}`, measured as `eval/gsm8k/accuracy` and so on."""
    split: Annotated[str, when.EVALUATION, when.PROMPTS] = "test"
    """Split of the evaluation data."""
    every: Annotated[Positive | None, when.EVALUATION] = None
    """Steps between evaluations; unset evaluates before the first and after the last."""
    temperature: Annotated[Amount, RL, when.EVALUATION] = 0.6
    """Sampling temperature of evaluations."""
    samples_per_prompt: Annotated[Positive, RL, when.EVALUATION] = 4
    """Answers per evaluation prompt."""
    max_samples: Annotated[Positive | None, when.EVALUATION, when.PROMPTS] = None
    """Evaluation rows used at most."""
    reward: Annotated[str | None, RL, when.EVALUATION, when.SCORED] = None
    """Python file like `reward.function` that scores only evaluations; unset uses the run's own rewards."""
    graders: Annotated[list[GraderConfig], RL, when.EVALUATION, when.SCORED] = []
    """Graders like `reward.graders` that score only evaluations, instead of the run's own rewards."""

    @property
    def is_switched_off(self) -> bool:
        """`path` was set to null, instead of being left unset."""
        return self.path is None and "path" in self.model_fields_set
