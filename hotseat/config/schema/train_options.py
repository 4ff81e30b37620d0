"""How models are trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hotseat.config import conditions as when
from hotseat.config.annotations import RL, Acts, BackendName, MayChange
from hotseat.config.schema.section import AboveOne, Decay, NotNegative, Positive, Section
from hotseat.registry.backends import DEFAULT_BACKEND, backend_entry


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
    dtype: Annotated[Literal["bf16", "fp16", "fp32"] | None, Acts.WHILE_SAMPLING] = None
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
    """Leave the visual encoder as it is, and train the rest of a vision-language model."""
    liger_kernel: bool = False
    """Liger kernels in the layers' norms and gates, on a GPU, instead of torch.compile."""
    load_in_4bit: Annotated[bool, when.FROZEN_WEIGHTS, Acts.WHILE_SAMPLING] = False
    """Keep the frozen weights of linear layers in NF4, 4 bits each, in trainer and engines alike (QLoRA)."""
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
    full_determinism: Annotated[bool, Acts.WHILE_SAMPLING] = False
    """Deterministic kernels of torch and, on GPUs, of vLLM: the same run has the same bits again, more slowly."""

    @property
    def tensor_parallel_size(self) -> int:
        return self.deepspeed.tensor_parallel_size if backend_entry(self.backend).has_zero_options else 1

    @property
    def num_model_parallel(self) -> int:
        """Neighbouring ranks that get the same samples, because they share sequences or layers."""
        return self.sequence_parallel_size * self.tensor_parallel_size
