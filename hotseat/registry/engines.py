"""The rollout engines, and the facts by which other code decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hotseat.registry.lookup import Table, names_with


@dataclass(frozen=True)
class EngineEntry:
    """Facts about a rollout engine."""

    name: str  # of `rollout.engine`, `reward.judge.engine.kind` and `reference.engine`
    title: str  # in messages
    summary: str  # for the docs
    kind: str  # "module:attribute" of its `rollout.kinds.EngineKind`
    package: str | None = None  # that it needs besides torch and transformers
    options: frozenset[str] = frozenset()  # that not every engine has, by their names in `rollout`
    instead: Mapping[str, str] = field(default_factory=dict)  # what it does instead of having an option
    memory_share: float | None = None  # of a device, which its cache fills; None: its cache is what its slots need
    num_slots: int | None = None  # sequences at a time; None: as many as the option says
    num_kept_prompts: int = 0  # of full length, kept beside its slots for requests that begin alike
    offloads_on_cpu: bool = True
    sees_simulators: bool = True  # it takes the images of simulators
    is_sized_by_images: bool = False  # it starts with the largest image that requests may have
    encodes_by_prompt: bool = False  # images of one prompt, or of small ones, at a time; else of all that a step begins
    expands_latent: bool = False  # latent attention: each step makes keys and values of the whole cache
    is_busy_per_sequence: bool = False  # on the host, in each step: small models leave their device idle
    compiles: bool = False  # when it starts, which takes longer than other roles' starts
    acts_in_numbers: bool = False  # it runs policies that act in numbers (`hotseat.numeric`) instead of language models
    teaches: bool = False  # it says which tokens are likely at each place of given ones (`reference.engine`)
    needs_bf16_units: tuple[str, ...] = ()  # machines on whose CPUs it cannot compute in bf16 without units for it

    def without(self, option: str) -> str:
        """Word why an option has no effect on this engine, behind `rollout.engine is`."""
        if option in self.instead:
            return f"{self.name}, which {self.instead[option]}"
        return f"{self.name}; this is for {' or '.join(names_with(ENGINES, option))}"


DEFAULT_ENGINE = "transformers"

ENGINES = Table[EngineEntry](
    "engine",
    EngineEntry(
        "transformers",
        "transformers",
        "A model of transformers, in slots that are decoded together.",
        "hotseat.rollout.transformers_engine:TransformersKind",
        options=frozenset({"num_slots", "routing_replay"}),
        num_kept_prompts=8,
        encodes_by_prompt=True,
        expands_latent=True,
    ),
    EngineEntry(
        "vllm",
        "vLLM",
        "vLLM's scheduler and kernels.",
        "hotseat.rollout.vllm_kind:VllmKind",
        package="vllm",
        options=frozenset(
            {
                "memory_share",
                "prefix_caching",
                "enforce_eager",
                "engine_args",
                "quantization",
                "kv_cache_dtype",
                "lora_sync",
                "tensor_parallel_size",
                "routing_replay",
            }
        ),
        instead={"num_slots": "sizes its own batch"},
        memory_share=0.9,
        num_slots=512,  # the most that its CUDA graphs take
        offloads_on_cpu=False,
        sees_simulators=False,
        is_sized_by_images=True,
        is_busy_per_sequence=True,
        compiles=True,
        teaches=True,
        needs_bf16_units=("aarch64",),
    ),
    EngineEntry(
        "numeric",
        "numeric",
        "Policies that act in numbers: one forward for all observations that wait.",
        "hotseat.rollout.numeric_engine:NumericKind",
        options=frozenset({"num_slots"}),
        sees_simulators=False,
        acts_in_numbers=True,
    ),
)

engine_entry = ENGINES.entry
