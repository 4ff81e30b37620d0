"""Sampling, and who plays the episodes: agents, simulators and custom components."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from hotseat.config import conditions as when
from hotseat.config.annotations import EngineName, MayChange
from hotseat.config.schema.section import (
    CLASS,
    AboveOne,
    AboveZero,
    Amount,
    NonEmpty,
    NotNegative,
    Positive,
    Seconds,
    Section,
    Share,
)
from hotseat.registry.engines import DEFAULT_ENGINE


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
    oversample: Annotated[Amount, when.SCORED, when.NO_STALENESS] = 0.0
    """Prompts sampled beyond those of a step, as a share of them; the first complete groups stay: short ones gain."""
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
    max_thinking_tokens: Annotated[Positive | None, when.NO_AGENT] = None
    """Tokens after which thinking is ended by inserting `</think>`, which is not learned; unset is no bound."""
    stop: Annotated[NonEmpty | list[NonEmpty] | None, when.TEXT] = None
    """String, or several, that end an answer, in evaluations too; its last token stays as it was sampled."""
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
    routing_replay: Annotated[bool, when.RECORDED_ROUTING, when.engine_has("routing_replay")] = False
    """In a mixture of experts, have the trainer send each token to the experts that it took in the engine."""
    quantization: Annotated[Literal["fp8"] | None, when.engine_has("quantization")] = None
    """Have vLLM keep the weights of linear layers, and compute with them, in FP8; unset is the model's dtype."""
    kv_cache_dtype: Annotated[Literal["fp8"] | None, when.engine_has("kv_cache_dtype")] = None
    """Have vLLM keep the KV cache in FP8, on GPUs; unset is the model's dtype."""
    lora_sync: Annotated[
        Literal["merged", "adapter"] | None, when.LORA, when.engine_has("lora_sync"), MayChange.ENGINE
    ] = None
    """Send vLLM weights with adapters merged in, or adapters alone; unset: merged, or adapters beside 4-bit weights."""
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
    preload: Annotated[list[str], when.COMMAND, MayChange.LIMITS] = []
    """Modules that the interpreter of a command `python FILE.py` imports once; each episode is then a fork of it."""
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
    """The policy sees the simulator's images, in front of the words; `actor.model` must be a vision-language model."""
    chunk: Positive = 1
    """Actions that the policy samples at once."""
    bins: Annotated[int, Field(ge=2)] = 256
    """Bins of each number of an action or a state; they are the last tokens of the vocabulary."""
    max_steps: Positive | None = None
    """Actions of an episode at most; unset is the simulator's own limit."""
    reward: Literal["simulator", "success"] = "simulator"
    """The simulator's rewards, or 1 for an episode that succeeds and 0 for others."""
    reward_scale: AboveZero = 1.0
    """Factor of these rewards."""
    relative_rewards: bool = False
    """Reward an action with the change of the reward since the action before; the first has its own."""
    bootstrap_terminated: Annotated[bool, when.CRITIC] = False
    """Add the critic's value of the last observation where a task ended, too, not only where time ran out."""
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
    path: Annotated[str, Field(pattern=CLASS)]
    """Custom class: `FILE.py:CLASS` or `package.module:CLASS`."""
    kwargs: dict[str, Any] = {}
    """Arguments of its constructor."""
    memory_gib: Annotated[float, Field(ge=0)] = 0.0
    """Memory of one of its processes on its device, for planning; 0: it has nothing there."""
    enable_offload: bool | None = None
    """Call its methods `offload` and `onload` between phases: true always, false never, unset as needed."""
    evaluates: bool = False
    """It sees the groups of evaluations too: they are measured by its rewards, without those that it drops."""
