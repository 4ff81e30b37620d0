"""The config tree: every option of Hotseat with its type, range, default and meaning.

Defaults are defined only here. `None` means "not set": the option is derived, absent, or decided as needed; the
field's description says which. Beside its type, or beside that of a section around it, an option has what it takes
to have an effect: `Tasks`, of which the innermost count and without which it has one in all tasks, and conditions of
`conditions.py` (`when.LORA`), which must all hold. `MayChange` is beside what may change when a run resumes.
`presence.py` derives the roles of a run from the tree; what contradicts what is in `conflicts.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hotseat.config import conditions as when
from hotseat.config.annotations import (
    ALL,
    DPO,
    PAIRS,
    RL,
    RL_OR_DPO,
    RL_OR_SFT,
    RM,
    SFT,
    BackendName,
    CorrectionName,
    EngineName,
    EstimatorName,
    MayChange,
    PolicyLossName,
    PreferenceLossName,
    RoleName,
    TaskName,
    Tasks,
)
from hotseat.registry.backends import DEFAULT_BACKEND, backend_entry
from hotseat.registry.engines import DEFAULT_ENGINE
from hotseat.registry.estimators import DEFAULT_ESTIMATOR
from hotseat.registry.policy_losses import DEFAULT_POLICY_LOSS
from hotseat.registry.preference_losses import DEFAULT_PREFERENCE_LOSS
from hotseat.registry.tasks import DEFAULT_TASK, TaskEntry, task_entry

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]  # at 1 an average would never take anything in
Share = Annotated[float, Field(gt=0, le=1)]
Amount = Annotated[float, Field(ge=0)]
AboveZero = Annotated[float, Field(gt=0)]
AboveOne = Annotated[float, Field(gt=1)]
Seconds = AboveZero
_FUNCTION, _CLASS = r"^.+\.py:\w+$", r"^.+:\w+$"
FORMS = {_FUNCTION: "FILE.py:FUNCTION", _CLASS: "FILE.py:CLASS or package.module:CLASS"}  # patterns in words
FunctionPath = Annotated[str, Field(pattern=_FUNCTION)]


DEFAULT_MINUTES = 10.0  # between checkpoints, where the config does not say when to save


class Section(BaseModel):
    """A frozen part of the tree in which an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


# --- where things run -------------------------------------------------------------------------------------------------


class PoolEnvConfig(Section):
    node_ranks: str | int = "all"
    """Nodes these variables are for, counted within the cluster: `0-3`, `all`."""
    env_vars: list[dict[str, str]] = []
    """Environment variables of processes on these nodes, one mapping each."""


class NodePoolConfig(Section):
    label: str
    """Name of the pool, used as `label/SELECTION` in a placement."""
    node_ranks: str | int = "all"
    """Nodes in the pool: `0-7`, `8`, `all`."""
    ignore_hardware: bool = False
    """Treat the pool's nodes as CPU nodes: its ranks are then node ranks."""
    env_configs: list[PoolEnvConfig] = []
    """Environment variables of the pool's processes."""


class PoolPlacementConfig(Section):
    node_group: str | list[str]
    """Pool, or list of pools whose ranks are numbered through."""
    placement: str | int
    """Selection within the pool."""


class ClusterConfig(Section):
    runtime: Literal["ray", "local"] = "ray"
    """`ray` runs each role in processes of its own; `local` runs one rank of each in this one, without Ray."""
    num_nodes: Positive | None = None
    """Nodes to use; unset takes as many as the placement needs."""
    inventory: str | None = None
    """Machines to plan for, such as `4x8xA100-80G`; unset asks the running cluster."""
    component_placement: dict[str, str | int | PoolPlacementConfig] = {}
    """Role, or comma-joined roles, to selection: `0-7`, `all`, `2x8`, `@actor`, `cpu*4`, `none`, `pool/0-3`."""
    component_names: dict[str, RoleName] = {}
    """Custom names for roles, such as `simulator: env`, to use in `component_placement` and in `flow`."""
    node_groups: list[NodePoolConfig] = []
    """Named pools of nodes with environment variables of their own."""
    profile: Annotated[str | None, RL] = None
    """File of `hotseat profile`, by which the seconds of a step are predicted, for the report."""
    threads_per_process: Positive = 1
    """CPU threads of each worker process; never inherited, because sums depend on their number."""
    call_timeout_s: Seconds = 1800.0
    """Longest that one call to a worker may take, or its start, which has at least 300 s, before it is an error."""
    silence_timeout_s: Seconds = 30.0
    """Longest that a process may be stopped, or an engine not answer a ping, before it is ended or replaced."""


class PhaseConfig(Section):
    name: str
    """Name of the phase."""
    run: list[str] | dict[str, list[str]] = []
    """Roles that work; a mapping also lists the parts of each role that must be on its devices."""
    train: list[str] = []
    """Roles whose weights are updated."""
    push: list[str] = []
    """Roles that get the actor's weights."""
    order: Literal["together", "in_turn"] = "together"
    """Whether roles that share a device work at the same time or one after another."""


class OverlapConfig(Section):
    staleness: NotNegative = 0
    """Weight versions by which a sample may lag behind the policy that learns from it; 0: rollout, then training."""
    queue: Annotated[NotNegative | None, when.AHEAD] = None
    """Batches that rollout may be ahead, besides the one in progress; unset is as many as `staleness`."""
    order: Annotated[Literal["prompt", "arrival"], when.AHEAD] = "prompt"
    """A batch is made of the next prompts, whoever is slow, or of the groups that are finished first."""
    in_flight: Annotated[Literal["wait", "keep", "recompute", "restart"], when.AHEAD] = "wait"
    """Open requests at a push: finish first, continue with the old or a recomputed KV cache, or start over."""


# --- models and roles -------------------------------------------------------------------------------------------------


class MuonConfig(Section):
    learning_rate: Amount = 0.02
    """Peak learning rate of matrices; other weights have the optimizer's own `learning_rate`."""
    momentum: Decay = 0.95
    """Decay of the momentum."""


class OptimizerConfig(Section):
    kind: Literal["adamw", "muon"] = "adamw"
    """Which optimizer; `muon` is for the matrices inside a model, all else is left to AdamW."""
    learning_rate: Annotated[Amount, MayChange.LEARNING_RATE] = 1e-6
    """Peak learning rate."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    """Decay of Adam's first and second moment."""
    eps: AboveZero = 1e-8
    """Adam's epsilon."""
    weight_decay: Amount = 0.0
    """Decoupled weight decay, on matrices only."""
    schedule: Annotated[Literal["cosine", "linear", "constant"], MayChange.LEARNING_RATE] = "cosine"
    """Shape of the learning rate after warm-up."""
    warmup_ratio: Annotated[Fraction, MayChange.LEARNING_RATE] = 0.03
    """Share of all optimizer steps over which the learning rate rises; at least one step has the peak."""
    min_learning_rate_ratio: Annotated[Fraction, when.DECAYING_SCHEDULE, MayChange.LEARNING_RATE] = 0.1
    """Learning rate at the end, as a share of its peak (cosine and linear)."""
    max_grad_norm: Amount = 1.0
    """Gradients are scaled down to this global norm; 0 does not clip."""
    muon: Annotated[MuonConfig, when.MUON] = MuonConfig()
    """Options of Muon."""


class CriticOptimizerConfig(OptimizerConfig):
    learning_rate: Annotated[Amount, MayChange.LEARNING_RATE] = 9e-6
    """Peak learning rate."""


class ActorConfig(Section):
    model: str | None = None
    """Checkpoint directory or hub name of the policy."""
    shape: dict[str, Any] | None = None
    """The model's config.json, or the part that sizes it, for planning without the model at hand."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """How the policy is optimised."""
    enable_offload: Annotated[bool | None, RL, MayChange.PLACEMENT] = None
    """Offload weights, gradients and optimizer between phases: true always, false never, unset as needed."""


class CriticConfig(Section):
    model: str | None = None
    """Checkpoint of the value model; unset takes the reward model's, then the actor's."""
    shape: dict[str, Any] | None = None
    """As `actor.shape`."""
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    """How the critic is optimised."""
    enable_offload: Annotated[bool | None, MayChange.PLACEMENT] = None
    """As `actor.enable_offload`."""
    value_clip: AboveZero | None = 0.5
    """Clip range of the value update; unset does not clip."""
    warmup_steps: NotNegative = 0
    """Rollouts at the start in which only the critic learns; the actor's learning rate begins after them."""
    value_head_prefix: str = "score"
    """Name of the value head's parameters in the checkpoint."""


class ReferenceConfig(Section):
    model: str | None = None
    """Checkpoint of the reference policy; unset takes the actor's."""
    teachers: Annotated[dict[str, str], RL, when.DISTILLATION] = {}
    """Checkpoints of several teachers by name, instead of `model`; a prompt's `datasource` names its teacher."""
    teacher_weights: Annotated[dict[str, Share], RL, when.DISTILLATION] = {}
    """Weight of every teacher for all prompts, instead of one teacher by `datasource`; they add up to 1."""
    enable_offload: Annotated[bool | None, when.REFERENCE_IN_STEPS, MayChange.PLACEMENT] = None
    """Offload its weights between phases: true always, false never, unset as needed."""


class InferenceConfig(Section):
    enable_offload: Annotated[bool | None, MayChange.PLACEMENT] = None
    """Offload the copy of the policy that computes old log-probs: as `reference.enable_offload`."""


class EnvConfig(Section):
    path: str | None = None
    """Simulator that the policy acts in: `babyai`, `gym`, `mujoco_warp`, or a Python file; its episodes are data."""
    tasks: list[str] = []
    """Tasks by name, such as `BabyAI-GoToRedBallGrey-v0`; unset leaves them to the simulator."""
    kwargs: dict[str, Any] = {}
    """Further arguments of the simulator."""
    num_envs: Annotated[Positive, MayChange.SIMULATORS] = 16
    """Simulators of each process of the role env."""
    num_processes: Annotated[Positive, MayChange.SIMULATORS] = 1
    """Child processes of each stage, among which its simulators are divided."""
    images: bool = False
    """The policy sees the simulator's images, in front of the words; `actor.model` must be one that sees."""
    chunk: Positive = 1
    """Actions that the policy samples at once."""
    bins: Annotated[int, Field(ge=2)] = 256
    """Bins of each number of an action or a state; they are the last tokens of the vocabulary."""
    max_steps: Positive | None = None
    """Actions of an episode at most; unset is the simulator's own limit."""
    reward: Literal["simulator", "success"] = "simulator"
    """The simulator's rewards, or 1 for an episode that succeeds and 0 for others."""
    num_seeds: Positive = 1024
    """Seeds of each task to learn from; a task and a seed are a prompt."""
    eval_seeds: Annotated[NotNegative, MayChange.SIMULATORS] = 0
    """Held-out seeds of each task to evaluate on; 0: nothing is evaluated."""
    films: Annotated[NotNegative, when.WITHOUT_IMAGES, MayChange.SIMULATORS] = 0
    """Recorded samples, of each env process, that are played again for a film, where the policy sees no images."""
    step_timeout_s: Annotated[Seconds, MayChange.SIMULATORS] = 60.0
    """Longest that a simulator may take for a reset or a chunk of actions before it is replaced."""
    memory_gib: Annotated[AboveZero | None, MayChange.SIMULATORS] = None
    """Memory of one process of the role env on its device, for planning; unset is what an earlier run measured."""
    enable_offload: Annotated[bool | None, MayChange.PLACEMENT] = None
    """Offload simulators between phases: true always, false never, unset as needed."""


class ComponentConfig(Section):
    path: Annotated[str, Field(pattern=_CLASS)]
    """Custom class: `FILE.py:CLASS` or `package.module:CLASS`."""
    kwargs: dict[str, Any] = {}
    """Arguments of its constructor."""
    memory_gib: Annotated[float, Field(ge=0)] = 0.0
    """Memory of one of its processes on its device, for planning; 0: it has nothing there."""
    enable_offload: bool | None = None
    """Call its methods `offload` and `onload` between phases: true always, false never, unset as needed."""
    evaluates: bool = False
    """It sees the groups of evaluations too: they are measured by its rewards, without those that it drops."""


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


class RewardConfig(Section):
    function: Annotated[str | None, when.SCORED] = None
    """Python file with `reward_func(queries, prompts, labels)`."""
    kwargs: Annotated[dict[str, Any], when.REWARD_FILE] = {}
    """Further arguments of `function`, by name."""
    graders: Annotated[list[GraderConfig], when.SCORED] = []
    """Built-in graders; the reward is the weighted sum of their verdicts, plus the reward of `function`, if set."""
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


class CanaryConfig(Section):
    num_tokens: Annotated[int, Field(ge=512)] = 1024
    """Tokens of the policy's own answers whose log-probs engines and trainer compare after every push."""
    rounding_factor: AboveOne = 4.0
    """How many times larger than rounding alone a gap between them must be to be an error."""
    drift_factor: AboveOne = 4.0
    """How many times larger than after the first push a gap between them must be to be an error."""


class RolloutConfig(Section):
    engine: Annotated[EngineName, MayChange.ENGINE] = DEFAULT_ENGINE
    """Which engine samples."""
    batch_size: Positive = 128
    """Prompts per step."""
    samples_per_prompt: Positive = 1
    """Answers sampled for each prompt, which form its group."""
    micro_batch_size: Annotated[Positive | Literal["auto"], when.NO_TOKEN_BUDGET, MayChange.MICRO_BATCHES] = "auto"
    """Samples per rank in one forward when log-probs are computed; `auto`: as many tokens as fit on the device."""
    max_tokens_per_device: Annotated[Positive | None, MayChange.MICRO_BATCHES] = None
    """Token budget of that forward instead of `micro_batch_size`."""
    chosen_tokens_per_device: Annotated[Positive | None, when.NO_TOKEN_BUDGET, when.AUTO, MayChange.MICRO_BATCHES] = (
        None
    )
    """As `train.chosen_tokens_per_device`, for that forward."""
    temperature: Amount = 1.0
    """Sampling temperature; every log-prob of the run is taken at it."""
    top_p: Share = 1.0
    """Nucleus sampling; below 1 the trainer's own old log-probs are computed."""
    top_k: NotNegative = 0
    """Sample among the k likeliest; 0 is all."""
    max_new_tokens: Annotated[Positive | None, when.TEXT] = None
    """Tokens sampled per turn at most; unset is what `data.max_length` leaves."""
    num_engines: Annotated[Positive | None, MayChange.ENGINE] = None
    """Engines; unset is one per device, or per `tensor_parallel_size` devices."""
    tensor_parallel_size: Annotated[Positive, when.engine_has("tensor_parallel_size"), MayChange.ENGINE] = 1
    """Devices per engine."""
    memory_share: Annotated[Share | None, when.engine_has("memory_share"), MayChange.ENGINE] = None
    """Share of a device's memory that a vLLM engine takes; unset is 0.9. Without devices it has no effect."""
    num_hosts: Annotated[Positive | None, when.HOSTS, MayChange.ENGINE] = None
    """Processes that run agents and score their answers; unset is one on each node with engines."""
    pipeline_stage_num: Annotated[Positive, when.STEPPED, MayChange.SIMULATORS] = 1
    """Parts of each env process's simulators; while the policy samples for one, another steps."""
    num_slots: Annotated[Positive | None, when.engine_has("num_slots"), MayChange.ENGINE] = None
    """Sequences that one transformers engine decodes at a time; unset is 64, on GPUs as many as a step has and fit."""
    prefix_caching: Annotated[bool, when.engine_has("prefix_caching"), MayChange.ENGINE] = False
    """Reuse the cache of common prompt prefixes (vLLM)."""
    enforce_eager: Annotated[bool, when.engine_has("enforce_eager"), MayChange.ENGINE] = False
    """Run vLLM without CUDA graphs."""
    engine_args: Annotated[dict[str, Any], when.engine_has("engine_args"), MayChange.ENGINE] = {}
    """Further arguments of vLLM's engine, by its own names, such as `max_num_batched_tokens`."""
    fp32_head: Annotated[bool, when.HEAD, MayChange.ENGINE] = True
    """Compute the logits of a 16-bit engine in fp32, as the trainer does; false rounds them to the model's dtype."""
    quantization: Annotated[Literal["fp8"] | None, when.engine_has("quantization")] = None
    """Have vLLM keep the weights of linear layers, and compute with them, in FP8; unset is the model's dtype."""
    kv_cache_dtype: Annotated[Literal["fp8"] | None, when.engine_has("kv_cache_dtype")] = None
    """Have vLLM keep the KV cache in FP8, on GPUs; unset is the model's dtype."""
    lora_sync: Annotated[Literal["merged", "adapter"], when.LORA, when.engine_has("lora_sync"), MayChange.ENGINE] = (
        "merged"
    )
    """Send vLLM all weights with adapters merged in, or adapters alone, which it applies beside the weights it has."""
    weight_transport: Annotated[Literal["auto", "nccl", "gloo"], when.OTHER_DEVICES, MayChange.ENGINE] = "auto"
    """How weights reach engines on other devices; engines on the actor's devices always share memory."""
    enable_offload: Annotated[bool | None, MayChange.PLACEMENT] = None
    """Offload engine weights and cache between phases: true always, false never, unset as needed."""
    canary: Annotated[CanaryConfig, MayChange.ENGINE] = CanaryConfig()
    """Check that engines compute the policy that is trained, beyond the digests of their weights."""


class GatewayConfig(Section):
    bind: Annotated[str, MayChange.ADDRESSES] = "127.0.0.1"
    """Address that programs reach the policy at, `host` or `host:port`; each episode has a random token."""
    advertise_url: Annotated[str | None, MayChange.ADDRESSES] = None
    """URL that programs are given instead of the address bound, for sandboxes on other machines."""


class EnvironmentConfig(Section):
    family: Literal["gymnasium", "openenv", "reasoning_gym", "textarena", "verifiers"] | None = None
    """Library whose environment plays the episodes, in processes of its own; instead of `agent.path`."""
    name: Annotated[str | None, when.FAMILY] = None
    """Environment, as its library names it, or a Python file that makes it."""
    arguments: Annotated[dict[str, Any], when.FAMILY] = {}
    """Arguments of the environment."""
    num_processes: Annotated[Positive, when.OWN_PROCESS, MayChange.LIMITS] = 1
    """Processes of the environment per rollout host, each with many episodes at once."""


class AgentConfig(Section):
    path: str | None = None
    """Python file with an agent; unset answers in one turn."""
    command: list[str] | None = None
    """Program that plays an episode through an OpenAI endpoint, as a list of words; instead of `path`."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """Environment of another library that plays the episodes; instead of `path`."""
    python: Annotated[str | None, when.PYTHON, MayChange.ADDRESSES] = None
    """Interpreter of the environment, or of the function `play` in `path`; unset is Hotseat's own."""
    pass_env: Annotated[list[str], when.CHILD_PROCESS] = []
    """Names of variables that a command or an environment gets beside PATH, locale and Python's own."""
    containers: Annotated[Literal["podman", "docker"] | None, when.COMMAND] = None
    """Remove containers that the command started with `--label-file $HOTSEAT_LABEL_FILE`, by this engine."""
    sampling: Annotated[Literal["override", "refuse", "untrained"], when.PROGRAM] = "override"
    """A program's own temperature and the like: the run's hold, refused, or sampled that way and not learned from."""
    history: Annotated[Literal["append", "render"], when.PROGRAM] = "append"
    """Answers that a chat template changes later: kept as sampled, or rendered anew in another segment."""
    tool_parser: Annotated[str | None, when.PROGRAM] = None
    """Family of models whose tool calls are parsed, as the package `renderers` names it; unset asks the tokenizer."""
    gateway: Annotated[GatewayConfig, when.PROGRAM] = GatewayConfig()
    """The server through which programs reach the policy."""
    max_steps: Annotated[Positive | None, when.AGENT, when.TURNS] = None
    """Turns of an episode at most; unset leaves it to the agent."""
    turn_length: Annotated[Literal["max_new_tokens", "rest"], when.AGENT, when.TEXT] = "max_new_tokens"
    """Tokens that a turn may sample: `rollout.max_new_tokens`, or all that is left of `data.max_length`."""
    max_concurrent: Annotated[Positive | None, MayChange.LIMITS] = None
    """Episodes in flight per engine; unset keeps the engine full: twice its `num_slots`, or 512 with vLLM."""
    timeout_s: Annotated[Seconds, MayChange.LIMITS] = 1200.0
    """Longest that an episode may take; after that it counts as failed."""
    turn_timeout_s: Annotated[Seconds | None, MayChange.LIMITS] = None
    """Longest that the policy may take for one answer; unset is bounded by `timeout_s` alone."""
    tool_timeout_s: Annotated[Seconds | None, when.AGENT, MayChange.LIMITS] = None
    """Longest that environment, tools or program may take between two answers; unset is bounded by `timeout_s`."""
    on_timeout: Annotated[Literal["fail", "score"], MayChange.LIMITS] = "fail"
    """A policy that runs out of time fails the sample, or is cut there and scored; tools that do fail it always."""


# --- data -------------------------------------------------------------------------------------------------------------


class DataConfig(Section):
    path: Annotated[str | None, when.PROMPTS] = None
    """File, saved data set or hub name; several joined by commas."""
    probs: Annotated[str | None, when.PATH] = None
    """Sampling probability of each part of `path`, joined by commas."""
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
    """Column of images, for models that see: paths, bytes, `data:` URIs, or a list of them."""
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
    multiturn: Annotated[bool, SFT] = False
    """Learn from every assistant turn, not from the last one only (sft)."""
    pretrain_mode: Annotated[bool, SFT] = False
    """Learn from every token (sft)."""
    sampler: Annotated[FunctionPath | None, RL] = None
    """Your own function, `my.py:function`, that chooses each step's prompts, such as a curriculum (rl)."""
    shuffle: Annotated[bool, RL, when.PROMPTS, when.NO_SAMPLER] = True
    """Use the prompts in another order in each pass; false keeps their order in the data (rl)."""
    prompt_max_length: Annotated[Positive | None, RL, when.PROMPTS] = None
    """Longest prompt that is kept; unset: `max_length` less `rollout.max_new_tokens` if that is set, else its half."""
    max_length: Positive = 2048
    """Tokens of a whole sequence at most."""
    max_lost_fraction: Annotated[Fraction, when.PROMPTS, MayChange.LIMITS] = 0.05
    """Share of rows that length limits may drop or cut before the run refuses to start; 1 only warns."""


# --- algorithms -------------------------------------------------------------------------------------------------------


class KlConfig(Section):
    coef: Annotated[Amount, MayChange.KL] = 0.0
    """Weight of the KL to the reference; 0 runs without a reference."""
    target: Annotated[AboveZero | None, when.KL, MayChange.KL] = None
    """Adapt the weight towards this KL; unset keeps it fixed."""
    horizon: Annotated[Positive, when.KL, when.ADAPTIVE_KL, MayChange.KL] = 10000
    """Samples over which the weight adapts; must be above a fifth of the samples of a step."""
    estimator: Annotated[Literal["k1", "k2", "k3"] | None, when.KL] = None
    """Estimator of the KL from one sample; unset is `k1` in the reward and `k2` as a loss."""
    as_loss: Annotated[bool, when.KL] = False
    """Put the KL into the loss instead of the reward."""
    allow_k1_loss: Annotated[bool, when.KL, when.K1_LOSS] = False
    """Allow `k1` as a loss, whose gradient is zero on average: for comparisons with OpenRLHF."""


class CorrectionConfig(Section):
    kind: CorrectionName | None = None
    """Correction of the gap between engine and trainer; unset is none; if stale or FP8, tis or rollout-ratio."""
    low: Annotated[Amount, when.CORRECTION, when.CORRECTION_BOUNDS] = 0.5
    """Lower bound of the ratio."""
    high: Annotated[Amount, when.CORRECTION, when.CORRECTION_BOUNDS] = 5.0
    """Upper bound of the ratio."""
    normalise: Annotated[bool, when.CORRECTION, when.CORRECTION_WEIGHTS] = False
    """Divide the weights by their mean over the step."""
    reject: Literal["k1", "k2", "k3"] | None = None
    """Drop answers by the mean of this divergence between engine and trainer over their tokens; unset drops none."""
    reject_low: Annotated[Amount | None, when.K1_REJECTION] = None
    """Lower bound of the geometric mean of the ratio, for k1; unset is 1 / `reject_high`."""
    reject_high: Annotated[AboveZero | None, when.REJECTION] = None
    """Upper bound: of the geometric mean of the ratio for k1, of the mean divergence for k2 and k3."""


class FilteringConfig(Section):
    enabled: bool = False
    """Replace prompts whose mean score is outside the range."""
    low: Annotated[float, when.ENABLED] = 0.0
    """Keep a prompt if its mean score is above this."""
    high: Annotated[float, when.ENABLED] = 1.0
    """Keep a prompt if its mean score is below this."""


class DpoConfig(Section):
    loss: PreferenceLossName = DEFAULT_PREFERENCE_LOSS
    """Loss of a pair."""
    beta: AboveZero = 0.1
    """Scale of the implicit rewards; for ORPO the weight of the odds ratio, for SimPO usually 2."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), when.LABEL_SMOOTHING] = 0.0
    """Share of flipped preferences to expect (cDPO)."""
    length_normalised: Annotated[bool, when.LENGTH_NORMALISED] = False
    """IPO of log-probs per token, as in TRL; if false, of sums over each answer, as in OpenRLHF."""
    gamma: Annotated[Amount, when.TARGET_MARGIN] = 0.5
    """SimPO's target margin between the rewards of the two answers."""
    nll_coef: Annotated[Amount, when.NLL] = 0.0
    """Weight of the negative log-likelihood per token of the chosen answer; ORPO always has it."""
    precompute: Annotated[bool, when.COMPARED] = False
    """Compute the reference's log-probs once before training, and keep them on disk; if false, anew in every step."""


class RewardModellingConfig(Section):
    loss: Literal["sigmoid", "logexp"] = "sigmoid"
    """Pairwise loss."""
    margin: bool = False
    """Use the data's margin column."""
    value_head_prefix: str = "score"
    """Name of the reward head's parameters in the checkpoint that is written."""


class AlgorithmConfig(Section):
    estimator: EstimatorName | FunctionPath = DEFAULT_ESTIMATOR
    """Advantage estimator, or your own, `my.py:function`."""
    time_step: Literal["token", "action", "chunk"] = "token"
    """Step of time of gae and of the ratio: a token, an action of a simulator, or a chunk of actions (or turn)."""
    ratio_step: Literal["token", "action", "chunk"] | None = None
    """Tokens that share a ratio, where the policy loss allows it, no more than `time_step`; unset is `time_step`."""
    turn_credit: Annotated[Literal["to_go", "own", "sum"], when.AGENT] = "to_go"
    """What a turn is credited with where agents reward turns: its reward and later ones, its own alone, or the sum."""
    gamma: Annotated[Fraction, when.DISCOUNT] = 1.0
    """Discount per step of time, for estimators that discount."""
    gae_lambda: Annotated[Fraction, when.GAE] = 1.0
    """GAE's lambda."""
    std_norm: Annotated[bool, when.DEVIATION] = True
    """Divide advantages by their deviation, where the estimator does."""
    batch_norm: bool | None = None
    """Normalise advantages over all tokens of a step; unset: where the estimator does."""
    policy_loss: PolicyLossName | FunctionPath = DEFAULT_POLICY_LOSS
    """Policy loss, or your own, `my.py:function`."""
    clip_low: Share = 0.2
    """The ratio is clipped at 1 minus this."""
    clip_high: AboveZero = 0.2
    """The ratio is clipped at 1 plus this."""
    dual_clip: Annotated[AboveOne | None, when.DUAL_CLIP] = None
    """Bound on the loss of negative advantages; unset is none."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] | None = None
    """Mean of token losses: over a step's tokens, per episode, or by a constant; unset is that of the loss's paper."""
    mask_truncated: bool = False
    """Leave answers that did not end by themselves out of the policy's loss; they still count in baselines."""
    entropy_coef: Amount | None = None
    """Weight of the entropy bonus; 0 only logs it, unset does not compute it."""
    aux_loss_coef: Annotated[Amount, ALL] = 0.0
    """Weight of the balancing loss of a mixture of experts: a mean over micro-batches, weighted by their tokens."""
    distill_coef: Amount = 0.0
    """Weight of on-policy distillation in the advantages, from `reference.model` or `reference.teachers`; 0 is none."""
    kl: KlConfig = KlConfig()
    """KL to the reference policy."""
    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction."""
    filtering: FilteringConfig = FilteringConfig()
    """DAPO's dynamic filtering."""
    dpo: Annotated[DpoConfig, DPO] = DpoConfig()
    """Preference optimisation (task dpo)."""
    reward_modelling: Annotated[RewardModellingConfig, RM] = RewardModellingConfig()
    """Reward-model training (task rm)."""


# --- training ---------------------------------------------------------------------------------------------------------


class DeepSpeedConfig(Section):
    zero_stage: Annotated[int, Field(ge=0, le=3), MayChange.PLACEMENT] = 2
    """What ZeRO shards: 0 nothing, 1 the optimizer, 2 also gradients, 3 also weights; one rank runs 3 as 2."""
    adam_offload: Annotated[bool, MayChange.PLACEMENT] = False
    """Keep and step the optimizer on the CPU."""
    zpg: Annotated[Positive, MayChange.PLACEMENT] = 1
    """Ranks of ZeRO++'s secondary weight partition."""
    overlap_comm: Annotated[bool, MayChange.PLACEMENT] = False
    """Overlap gradient reduction with the backward pass."""
    grad_accum_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Type in which gradients accumulate; unset is DeepSpeed's choice, the type of the computation."""
    deepcompile: bool = False
    """DeepSpeed compiles the model as a whole, on CUDA devices; the first update takes minutes."""
    tensor_parallel_size: Annotated[Positive, MayChange.PLACEMENT] = 1
    """Ranks that share each layer (AutoTP); it divides the ranks, the heads and the width of MLPs."""


class LoraConfig(Section):
    rank: NotNegative = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: Annotated[Positive, when.LORA] = 16
    """The adapters' product is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1), when.LORA] = 0.0
    """Dropout before the adapters, in updates only; scoring and sampling have none."""
    target_modules: Annotated[list[str] | str, when.LORA] = "all-linear"
    """Linear layers that get adapters: suffixes of their names, or a regular expression for whole names."""


class EmaConfig(Section):
    enabled: bool = False
    """Keep a moving average of what is trained, and export it beside the model."""
    beta: Annotated[Decay, when.ENABLED] = 0.992
    """Share of the average that is kept in each optimizer step."""


class TrainConfig(Section):
    backend: Annotated[BackendName, MayChange.PLACEMENT] = DEFAULT_BACKEND
    """Which backend trains."""
    batch_size: Positive = 128
    """Samples an optimizer step sees."""
    micro_batch_size: Annotated[Positive | Literal["auto"], when.NO_TOKEN_BUDGET, MayChange.MICRO_BATCHES] = "auto"
    """Samples per rank in one forward and backward; `auto`: as many tokens as fit on the device."""
    max_tokens_per_device: Annotated[Positive | None, MayChange.MICRO_BATCHES] = None
    """Tokens of a micro-batch on one device, at most, instead of `micro_batch_size`; balanced over ranks."""
    chosen_tokens_per_device: Annotated[Positive | None, when.NO_TOKEN_BUDGET, when.AUTO, MayChange.MICRO_BATCHES] = (
        None
    )
    """Token budget that `micro_batch_size: auto` chose. A run writes it into its own config, and resuming uses it."""
    num_episodes: Annotated[Positive, RL, MayChange.STEPS] = 1
    """Passes over the prompts (rl)."""
    max_epochs: Annotated[Positive, MayChange.PASSES] = 1
    """Passes over each rollout (rl) or over the data (sft, rm, dpo)."""
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """Type of the computation; unset: bf16 on GPUs, fp32 on CPUs. A run writes it into its own config."""
    fp32_master: Annotated[bool, when.MASTERS] = True
    """Keep fp32 master weights beside a 16-bit computation."""
    gradient_checkpointing: Annotated[bool, MayChange.RECOMPUTATION] = False
    """Recompute activations in the backward pass."""
    checkpointed_layers: Annotated[
        NotNegative | Literal["auto"] | None, when.CHECKPOINTING, MayChange.RECOMPUTATION
    ] = None
    """With gradient_checkpointing: recompute so many layers, evenly spread; `auto`: as few as fit. Unset: all."""
    compile: bool | None = None
    """Compile the model's layers with torch.compile; unset: on a GPU, where there is a C compiler."""
    packing: bool = True
    """Pack sequences without padding."""
    attention: str | None = None
    """Attention of transformers for padded rows, such as `sdpa`; unset: torch's own, flash attention on GPUs."""
    freeze_visual_encoder: Annotated[bool, when.IMAGES] = False
    """Leave the visual encoder as it is, and train the rest of a model that sees images."""
    liger_kernel: bool = False
    """Liger kernels in the layers' norms and gates, on a GPU, instead of torch.compile."""
    load_in_4bit: Annotated[bool, when.FROZEN_WEIGHTS] = False
    """Load frozen weights in 4 bits, for LoRA."""
    sequence_parallel_size: Annotated[Positive, MayChange.PLACEMENT] = 1
    """Ranks that share the sequences of a micro-batch (Ulysses); it divides the ranks and the attention heads."""
    max_skipped_steps: Positive = 5
    """Non-finite updates in a row before the run stops."""
    spike_factor: Annotated[AboveOne, RL, MayChange.LIMITS] = 100.0
    """Gradient norm that counts as a spike, as a multiple of the usual one (the median of the last 20 steps)."""
    on_spike: Annotated[Literal["warn", "stop"], RL, MayChange.LIMITS] = "warn"
    """Reaction to a spike: `warn` prints a warning that names samples, `stop` ends the run."""
    deepspeed: Annotated[DeepSpeedConfig, when.ZERO] = DeepSpeedConfig()
    """Options of the DeepSpeed backend."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters."""
    ema: EmaConfig = EmaConfig()
    """Moving average of the weights."""
    full_determinism: bool = False
    """Deterministic kernels of torch and, on GPUs, of vLLM: the same run has the same bits again, more slowly."""

    @property
    def tensor_parallel_size(self) -> int:
        return self.deepspeed.tensor_parallel_size if backend_entry(self.backend).has_zero_options else 1

    @property
    def num_model_parallel(self) -> int:
        """Neighbouring ranks that get the same samples, because they share sequences or layers."""
        return self.sequence_parallel_size * self.tensor_parallel_size


# --- evaluation, checkpoints and logs ---------------------------------------------------------------------------------


class EvaluationConfig(Section):
    path: Annotated[str | None, when.PROMPTS] = None
    """Evaluation data; unset does not evaluate; `null` also ignores the rest of `eval`."""
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


class CheckpointConfig(Section):
    path: Annotated[str | None, when.SAVES_OR_RESUMES] = None
    """Where checkpoints go; unset is `checkpoints` in the run directory."""
    every: Positive | None = None
    """Steps between checkpoints; unset: by time alone. The model is exported at the end in any case."""
    every_minutes: Amount | None = None
    """Minutes between checkpoints, 0: none by time; unset: 10 if `every` is unset, or more if saving takes over 5%."""
    keep_last: Annotated[Positive, when.SAVES_OR_RESUMES] = 3
    """Checkpoints kept, besides the best."""
    keep_final: Annotated[bool, when.SAVES_OR_RESUMES] = True
    """Make and keep a checkpoint of the last step, to extend the run; false deletes all that hold no exported model."""
    max_gib: Annotated[AboveZero | None, when.SAVES_OR_RESUMES] = None
    """Disk space all checkpoints may take; unset is no bound."""
    resume: bool = False
    """Resume from the newest checkpoint; without any, start from the first step."""
    allow_changes: Annotated[list[str], when.RESUMES] = []
    """Keys that may differ from the checkpoint, although results then differ from an uninterrupted run's."""
    best_metric: Annotated[str | None, when.EVALUATION] = None
    """Evaluation metric whose best checkpoint is kept; unset is the first one, `none` keeps no best."""
    save_state: Annotated[bool, when.SAVES_OR_RESUMES] = True
    """Save the state that resuming needs, not only the model."""
    background: Annotated[bool | None, when.SAVES] = None
    """Write checkpoints while training continues, from a copy in host memory; unset: where there is room for one."""
    export_each: Annotated[bool, when.SAVES_OR_RESUMES] = False
    """Export a Hugging Face model with each checkpoint."""
    export_path: str | None = None
    """Where the final Hugging Face model goes; unset is `model` in the run directory."""
    export_critic: Annotated[bool, RL, when.CRITIC] = False
    """Export the critic too: as `critic` beside `model`, or `export_path` with `_critic` at its end."""

    @property
    def minutes(self) -> float | None:
        """Minutes between checkpoints; None: none are made by time."""
        if self.every_minutes is None:
            return DEFAULT_MINUTES if self.every is None else None
        return self.every_minutes or None

    @property
    def is_made(self) -> bool:
        """Checkpoints are made, by steps or by time."""
        return self.every is not None or self.minutes is not None

    @property
    def is_used(self) -> bool:
        """Checkpoints are made, or one is looked for to resume from."""
        return self.is_made or self.resume

    @property
    def is_asked_for(self) -> bool:
        """The user set when to save; default checkpoints are skipped where they would cost too much."""
        return self.every is not None or bool(self.every_minutes)


class WandbConfig(Section):
    enabled: bool = False
    """Report to Weights & Biases; its key comes from WANDB_API_KEY, which also turns this on by itself."""
    org: Annotated[str | None, when.ENABLED] = None
    """Entity (user or team); unset is that of the API key."""
    project: Annotated[str | None, when.ENABLED] = None
    """Project; unset is that in WANDB_PROJECT, or `hotseat`."""
    group: Annotated[str | None, when.ENABLED] = None
    """Group of runs."""
    run_name: Annotated[str | None, when.ENABLED] = None
    """Name of the run in Weights & Biases; unset is the run's own name."""


class MlflowConfig(Section):
    enabled: bool = False
    """Report to MLflow."""
    uri: Annotated[str | None, when.ENABLED] = None
    """Tracking server or data base; unset is MLFLOW_TRACKING_URI, or `mlflow.db` beside the run's directory."""
    experiment: Annotated[str | None, when.ENABLED] = None
    """Experiment; unset is that in MLFLOW_EXPERIMENT_NAME, or `hotseat`."""
    run_name: Annotated[str | None, when.ENABLED] = None
    """Name of the run in MLflow; unset is the run's own name."""


class TrackioConfig(Section):
    enabled: bool = False
    """Report to Trackio, whose files are in TRACKIO_DIR or Hugging Face's cache."""
    project: Annotated[str | None, when.ENABLED] = None
    """Project; unset is that in TRACKIO_PROJECT, or `hotseat`."""
    space: Annotated[str | None, when.ENABLED] = None
    """Hugging Face Space to send the metrics to; unset keeps them on this machine."""
    group: Annotated[str | None, when.ENABLED] = None
    """Group of runs."""
    run_name: Annotated[str | None, when.ENABLED] = None
    """Beginning of the run's name in Trackio, which four digits follow; unset is the run's own name."""


class LogConfig(Section):
    every: Positive = 1
    """Steps between printed lines of metrics."""
    tensorboard_path: str | None = None
    """Where TensorBoard's files go; unset is `tensorboard` in the run directory."""
    samples_every: Annotated[Positive, RL, when.RECORDED_SAMPLES] = 5
    """Steps between recordings of samples; the first step is always recorded."""
    samples_per_step: Annotated[NotNegative, RL] = 8
    """Samples recorded in such a step, with values for every token, and as many of those that were dropped."""
    keep_rollouts: Annotated[bool, RL] = False
    """Keep all groups in `rollouts`, for `hotseat replay`: 17 bytes for each token, and the texts."""
    openrlhf_names: bool = True
    """Give TensorBoard and the trackers OpenRLHF's names of metrics beside ours, where they mean the same."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""
    mlflow: MlflowConfig = MlflowConfig()
    """MLflow."""
    trackio: TrackioConfig = TrackioConfig()
    """Trackio."""


class Config(Section):
    """A whole run."""

    task: TaskName = DEFAULT_TASK
    """What to train, and how."""
    name: Annotated[str | None, MayChange.LOGGING] = None
    """Name of the run; unset is the task and the first number that is free, such as `rl-1`."""
    run_dir: Annotated[str, MayChange.LOGGING] = "runs"
    """Directory under which the run's own directory is made."""
    seed: NotNegative = 42
    """Seed of everything random."""
    trust_remote_code: bool = False
    """Let model repositories run code of their own."""
    use_modelscope: bool = False
    """Take hub names from ModelScope."""
    cluster: Annotated[ClusterConfig, MayChange.PLACEMENT] = ClusterConfig()
    """Machines and placement."""
    flow: Annotated[list[PhaseConfig] | None, MayChange.PLACEMENT] = None
    """Phases of a step; unset is the task's usual flow."""
    overlap: Annotated[OverlapConfig, RL] = OverlapConfig()
    """How far phases on separate devices may run ahead."""
    actor: ActorConfig = ActorConfig()
    """The policy."""
    critic: Annotated[CriticConfig, RL, when.CRITIC] = CriticConfig()
    """The value model, of estimators with a critic."""
    reference: Annotated[ReferenceConfig, RL_OR_DPO, when.REFERENCE, when.COMPARED, when.OTHER_REFERENCE] = (
        ReferenceConfig()
    )
    """The reference policy (KL above 0, dpo), or the teacher (distill_coef above 0)."""
    inference: Annotated[InferenceConfig, RL, when.INFERENCE] = InferenceConfig()
    """Old log-probs, computed on devices of their own."""
    reward: Annotated[RewardConfig, RL] = RewardConfig()
    """Where rewards come from."""
    rollout: Annotated[RolloutConfig, RL] = RolloutConfig()
    """Sampling."""
    env: Annotated[EnvConfig, RL, when.ENV] = EnvConfig()
    """Simulators."""
    components: Annotated[dict[str, ComponentConfig], RL] = {}
    """Custom classes, by name, which score or filter the groups of a step before it is learned."""
    agent: Annotated[AgentConfig, RL] = AgentConfig()
    """How prompts become episodes."""
    data: DataConfig = DataConfig()
    """Prompts, examples or pairs."""
    algorithm: Annotated[AlgorithmConfig, RL] = AlgorithmConfig()
    """Advantages, losses and KL."""
    train: TrainConfig = TrainConfig()
    """How models are trained."""
    eval: Annotated[EvaluationConfig, MayChange.EVALUATION] = EvaluationConfig()
    """Evaluation."""
    checkpoint: Annotated[CheckpointConfig, MayChange.CHECKPOINTS] = CheckpointConfig()
    """Checkpoints and exported models."""
    log: Annotated[LogConfig, MayChange.LOGGING] = LogConfig()
    """Metrics and samples to record."""

    def with_options(self, options: Mapping[str, Any]) -> Config:
        """Return the config with other values at dotted keys of two words, which are not checked."""
        config = self
        for key, value in options.items():
            section, name = key.split(".")
            config = config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})
        return config

    @property
    def task_entry(self) -> TaskEntry:
        return task_entry(self.task)

    @property
    def has_rollouts(self) -> bool:
        return self.task_entry.has_rollouts


@functools.cache
def annotations_of(key: str) -> tuple[tuple[str, Any], ...]:
    """Return (section of the field, annotation) of the option at a dotted key and of the sections around it, first."""
    section: Any = Config
    found: list[tuple[str, Any]] = []
    around = ""
    for name in key.split("."):
        field = getattr(section, "model_fields", {}).get(name)
        if field is None:  # inside a list or a mapping, or no key at all
            break
        found += [(around, each) for each in field.metadata]
        around, section = f"{around}.{name}".removeprefix("."), field.annotation
    return tuple(found)


def tasks_of(key: str) -> tuple[str, ...]:
    """Return the tasks in which the option at a dotted key has an effect."""
    return next((each.names for _, each in reversed(annotations_of(key)) if isinstance(each, Tasks)), ALL.names)


def conditions_of(key: str) -> list[tuple[str, when.Condition | when.Beside]]:
    """Return (section, condition) of all that must hold for the option at a dotted key to have an effect."""
    kinds = (when.Condition, when.Beside)
    return [(section, each) for section, each in annotations_of(key) if isinstance(each, kinds)]


def changeable_keys(subject: MayChange) -> tuple[str, ...]:
    """Return the dotted keys of the options and sections that may change when a run resumes, of one subject."""

    def keys_in(section: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, field in section.model_fields.items():
            if subject in field.metadata:
                yield prefix + name
            elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                yield from keys_in(field.annotation, f"{prefix}{name}.")

    return tuple(keys_in(Config, ""))
