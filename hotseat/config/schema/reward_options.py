"""Sources of rewards."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from hotseat.config import conditions as when
from hotseat.config.annotations import EngineName, MayChange
from hotseat.config.schema.section import AboveZero, Amount, Fraction, NotNegative, Positive, Seconds, Section, Share
from hotseat.registry.engines import DEFAULT_ENGINE


class OverlongConfig(Section):
    buffer_length: NotNegative = 0
    """Tokens before the limit of sampled tokens of an episode over which the penalty grows; 0 is off."""
    penalty_factor: Annotated[Amount, when.OVERLONG] = 1.0
    """Penalty of an answer that reaches the limit."""


class GraderConfig(Section):
    kind: Literal["exact", "number", "math", "regex", "json", "code"]
    """What judges an answer: its text, final number or formula, a pattern, a JSON schema, or tests of its code."""
    name: str | None = None
    """Name of its verdicts in metrics and samples; unset is `kind`."""
    weight: float = 1.0
    """Factor of its verdict, which is 0 to 1, in the reward."""
    timeout_s: Seconds = 5.0
    """Longest that the verdict on one answer may take; for `code`, `reward.sandbox` has the limits."""
    pattern: str | None = None
    """Regular expression that has to occur in the answer, for `regex`."""
    json_schema: dict[str, Any] | None = None
    """Schema that the answer has to fit, for `json`."""
    partial: bool = False
    """Give the share of passed tests instead of 1 for all and 0 otherwise, for `code`."""


class SandboxConfig(Section):
    command: list[str] | None = None
    """Runner instead of bubblewrap; `{folder}` in it becomes the folder whose `main.py` it runs with Python."""
    python: Annotated[str | None, when.OWN_SANDBOX] = None
    """Interpreter of generated code, with its packages; unset is Hotseat's own, without packages."""
    timeout_s: Seconds = 20.0
    """Longest that one test may take; code that takes longer has failed it."""
    max_cpu_s: Seconds = 5.0
    """CPU time of all processes of one test together."""
    max_memory_mib: Annotated[int, Field(ge=64)] = 512
    """Memory of all processes of one test together, and of each of them."""
    max_processes: Positive = 32
    """Processes and threads of one test."""
    max_output_kib: Positive = 1024
    """Output of one test; code that writes more has failed it."""
    max_concurrent: Positive | None = None
    """Tests that run at the same time on a node; unset is its number of cores."""


class JudgeEngineConfig(Section):
    kind: Annotated[EngineName, MayChange.ENGINE] = DEFAULT_ENGINE
    """Which engine runs the judge."""
    num_engines: Annotated[Positive | None, MayChange.ENGINE] = None
    """Engines; unset is one per device, or per `tensor_parallel_size` devices."""
    tensor_parallel_size: Annotated[Positive, when.engine_has("tensor_parallel_size", "kind"), MayChange.ENGINE] = 1
    """Devices per engine."""
    max_length: Positive | None = None
    """Tokens of rubric, prompt, answer and verdict; unset is `data.max_length` + `max_tokens` + 1024 for the rubric."""
    num_slots: Annotated[Positive, when.engine_has("num_slots", "kind"), MayChange.ENGINE] = 64
    """Verdicts that one transformers engine writes at a time."""
    memory_share: Annotated[Share | None, when.engine_has("memory_share", "kind"), MayChange.ENGINE] = None
    """Share of a device's memory that a vLLM engine takes; unset is 0.9. Without devices it has no effect."""
    enforce_eager: Annotated[bool, when.engine_has("enforce_eager", "kind"), MayChange.ENGINE] = False
    """Run vLLM without CUDA graphs."""
    shape: dict[str, Any] | None = None
    """As `actor.shape`, for the judge."""
    enable_offload: Annotated[bool | None, MayChange.PLACEMENT] = None
    """Offload the judge's weights and cache between its turns: true always, false never, unset as needed."""


class JudgeConfig(Section):
    url: Annotated[str | list[str] | None, MayChange.ADDRESSES] = None
    """OpenAI-compatible endpoint, up to and with `/v1`, or several that share the work; unset: an engine of the run."""
    model: str | None = None
    """Name of the judge's model at the endpoint; without `url`, a checkpoint directory or a hub name."""
    engine: Annotated[JudgeEngineConfig, when.JUDGE_ENGINE] = JudgeEngineConfig()
    """Engine of the judge where `url` is not set; its devices are those of the role `judge`."""
    rubric: Annotated[str | None, when.SCORED] = None
    """File with the message to the judge, in which `{prompt}`, `{answer}` and `{label}` are filled in."""
    name: str = "judge"
    """Name of its verdicts in metrics and samples."""
    weight: float = 1.0
    """Factor of its verdict, which is 0 at the low end of `scale` and 1 at the high end, in the reward."""
    scale: Annotated[tuple[float, float], Field(strict=False)] = (0.0, 10.0)
    """Lowest and highest verdict; one outside is no verdict."""
    pattern: str = r"(?i)\b(?:score|rating|verdict|grade)\b\W{0,9}?(-?\d+(?:\.\d+)?)"
    """Regular expression whose one group is the verdict, in its last match in what the judge writes."""
    choices: dict[str, float] | None = None
    """Verdicts as words, each with its place on the scale, such as `{good: 10, bad: 0}`; unset: they are numbers."""
    votes: Positive = 1
    """Verdicts to ask for on each answer."""
    combine: Annotated[Literal["mean", "median", "majority"], when.SEVERAL_VOTES] = "mean"
    """How votes become one verdict; `majority` is the most frequent one, and the lowest of several such."""
    temperature: Amount | None = None
    """Sampling temperature of the judge; unset is 0 with one vote, and 1 with several."""
    max_tokens: Positive = 1024
    """Tokens that the judge may write for a verdict."""
    request: Annotated[dict[str, Any], when.JUDGE_URL] = {}
    """Further fields of requests, such as `chat_template_kwargs`."""
    timeout_s: Annotated[Seconds, MayChange.LIMITS] = 180.0
    """Longest that a request may take."""
    retries: Annotated[NotNegative, when.JUDGE_URL, MayChange.LIMITS] = 4
    """Further attempts after a failed request."""
    max_open_requests: Annotated[Positive, when.JUDGE_URL, MayChange.LIMITS] = 64
    """Requests of a rollout host at a time."""


class RewardFunctionConfig(Section):
    function: str
    """As `reward.function`."""
    weight: float = 1.0
    """Factor of its rewards in the sum."""
    name: str | None = None
    """Name of its rewards in metrics and samples; unset is the function's."""


class RewardConfig(Section):
    function: Annotated[str | None, when.SCORED] = None
    """Python file with `reward_func(queries, prompts, labels)`."""
    kwargs: Annotated[dict[str, Any], when.FUNCTION] = {}
    """Further arguments of `function`, by name."""
    functions: Annotated[list[RewardFunctionConfig], when.SCORED] = []
    """Several functions instead of `function`; the reward is the weighted sum of theirs, each of which is recorded."""
    graders: Annotated[list[GraderConfig], when.SCORED] = []
    """Built-in graders; the reward is the weighted sum of their verdicts, plus the reward of `function`, if set."""
    parts: Annotated[dict[str, float] | None, when.PARTS] = None
    """Rewards to compare apart, by name in metrics, with weights; unset: functions, graders, judge with theirs."""
    judge: Annotated[JudgeConfig, when.JUDGE] = JudgeConfig()
    """A model as judge, on if `rubric` is set; its verdict is added to the reward as a grader's is."""
    sandbox: Annotated[SandboxConfig, when.CODE_GRADER] = SandboxConfig()
    """Where the grader `code` runs generated code, and with which limits."""
    url: Annotated[str | list[str] | None, when.SCORED, MayChange.ADDRESSES] = None
    """Address of a reward server, or of several that share the work (OpenRLHF's protocol)."""
    model: Annotated[str | None, when.SCORED] = None
    """Checkpoint of a reward model."""
    shape: Annotated[dict[str, Any] | None, when.REWARD_MODEL] = None
    """As `actor.shape`, for the reward model."""
    enable_offload: Annotated[bool | None, when.REWARD_MODEL, MayChange.PLACEMENT] = None
    """Offload the reward model between phases: true always, false never, unset as needed."""
    value_head_prefix: Annotated[str, when.REWARD_MODEL] = "score"
    """Name of the reward head's parameters in the checkpoint."""
    normalize: Annotated[bool, when.REWARD_MODEL] = False
    """Subtract the mean and divide by the deviation stored with the reward model."""
    retokenize: Annotated[bool, when.REWARD_MODEL] = False
    """Tokenize the episode's text again for the reward model; if false, its vocabulary must be the actor's."""
    clip: Annotated[tuple[float, float], Field(strict=False)] | None = (-10.0, 10.0)
    """Rewards are clipped to this range after shaping; unset does not clip."""
    overlong: OverlongConfig = OverlongConfig()
    """DAPO's penalty on answers close to the length limit."""
    truncation_penalty: Annotated[float, Field(le=1)] | None = None
    """Reward of an answer that did not end by itself: 0 to 1 multiplies it, below 0 replaces it; unset keeps it."""
    timeout_s: Annotated[Seconds | None, when.REWARD_FILE_OR_URL, MayChange.LIMITS] = None
    """Longest that an attempt to score a group may take; unset is 60, with `url` 180."""
    retries: Annotated[NotNegative | None, when.REWARD_FILE_OR_URL, MayChange.LIMITS] = None
    """Further attempts after a failed one; unset is 2, with `url` 4."""
    max_open_requests: Annotated[Positive, when.REWARD_URL, MayChange.LIMITS] = 64
    """Groups that a rollout host has scored by the servers of `url` at a time, one request each."""
    max_memory_gib: Annotated[AboveZero | None, when.REWARD_FILE_OR_GRADERS, MayChange.LIMITS] = 8.0
    """Memory that the process of a reward function may take for its data; unset is no bound."""
    trial_timeout_s: Annotated[Amount, when.REWARD_FILE, MayChange.LIMITS] = 10.0
    """Longest that the trial call of a reward file, before the run starts, may take; 0 makes no trial call."""
    max_failed_fraction: Annotated[Fraction, MayChange.LIMITS] = 0.1
    """Share of a step's samples that may stay unscored before the run stops."""
