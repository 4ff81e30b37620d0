"""The roles of a config in the form that the planner takes: their selections, models and memory settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from hotseat.config import Config, roles_of
from hotseat.config.batches import num_checkpointed, token_budget, tokens_per_micro_batch
from hotseat.config.precision import dtype_of, with_dtype
from hotseat.config.presence import has_agent, has_images, has_judge_engine
from hotseat.config.resolved import judge_length, prompt_max_length
from hotseat.config.schema.rollout_options import RolloutConfig
from hotseat.config.schema.train_options import TrainConfig
from hotseat.errors import PlacementError
from hotseat.placement.memory_settings import ComponentMemory, EngineMemory, ForwardMemory, SimulatorMemory, TrainMemory
from hotseat.placement.memory_terms import NF4_BLOCK
from hotseat.placement.plan_types import RoleSpec
from hotseat.placement.selection import parse_placement
from hotseat.placement.shapes import ModelShape, VisionShape, from_hf_config, known_shape
from hotseat.planning.simulator_memory import kept_gib
from hotseat.registry.backends import BackendEntry, backend_entry
from hotseat.registry.engines import EngineEntry, engine_entry
from hotseat.registry.roles import role_entry

_QWEN_VALUES = 6  # numbers of a pixel in a patch: three colours, twice, since a still image is a film of two
DEFAULT_SLOTS = 64  # where `rollout.num_slots` is unset; on GPUs see `planning.slots`
_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
TEACHER_SLOTS = 8  # sequences that a teacher's engine reads at a time
_TOP_BYTES = 8  # of a token that a teacher finds likely: its number, and its log-prob in fp32


@contextmanager
def with_custom_names(config: Config) -> Iterator[None]:
    """Add the names that the config has for roles to a `PlacementError` that mentions these roles."""
    try:
        yield
    except PlacementError as error:
        words = set(re.findall(r"\w+", str(error)))
        own = [f"{role} is {name}" for name, role in config.cluster.component_names.items() if role in words]
        if not own:
            raise
        raise type(error)(f"{error} (by cluster.component_names, {' and '.join(own)})") from None


def not_described(config: Config) -> list[str]:
    """List local models whose memory cannot be computed from their config, with why."""
    notes = []
    named = {f"{role}.model": _named(config, role) for role in ("actor", "critic", "reference", "reward")}
    if has_judge_engine(config):
        named["reward.judge.model"] = _named(config, "judge")
    named |= {f"reference.teachers.{name}": (model, None) for name, model in config.reference.teachers.items()}
    for key, (model, shape) in named.items():
        local = None if model is None else _local_config(model)
        if local is None or shape is not None:
            continue
        try:
            from_hf_config(local)
        except PlacementError as error:
            notes.append(f"{key}: its memory is not checked: {error}")
    return notes


def engine_of(config: Config, role: str = "rollout") -> EngineEntry:
    return engine_entry(config.rollout.engine if role == "rollout" else config.reward.judge.engine.kind)


def engine_slots(config: Config, role: str = "rollout") -> int:
    """Return how many sequences one engine decodes at a time."""
    section = config.rollout if role == "rollout" else config.reward.judge.engine
    return engine_of(config, role).num_slots or section.num_slots or DEFAULT_SLOTS


def backend_of(config: Config) -> BackendEntry:
    return backend_entry(config.train.backend)


def simulator_memory(config: Config) -> SimulatorMemory | None:
    configured, measured = config.env.memory_gib, kept_gib(config)
    if configured is not None:
        return SimulatorMemory(configured)
    return None if measured is None else SimulatorMemory(measured, source="measured by an earlier run")


def role_specs(config: Config) -> list[RoleSpec]:
    """Return every role of the run in the form that the planner takes. A role without a placement goes to the actor's.

    Where `train.dtype` is unset, memory is that of a run on GPUs.
    """
    priced = with_dtype(config, has_gpus=True)
    placed = {
        names: value if isinstance(value, str | int) else value.model_dump()
        for names, value in config.cluster.component_placement.items()
    }
    present = roles_of(config)
    with with_custom_names(config):
        selections: dict[str, Any] = dict(parse_placement(placed, tuple(config.components)))
        for role in selections:
            if role not in present:
                raise PlacementError(
                    f"cluster.component_placement: {role} is placed, but this run has no {role}: remove it"
                )
    selections.setdefault("actor", "0")
    # Packed selections take devices in this order: the actor first, then as the config lists them.
    order = ["actor", *(role for role in (*selections, *present) if role != "actor")]
    return [_spec(priced, role, selections.get(role, "@actor")) for role in dict.fromkeys(order)]


def _spec(config: Config, role: str, on: Any) -> RoleSpec:
    entry, section = role_entry(role), section_of_role(config, role)
    offload: bool | None = section.enable_offload
    if entry.kind == "simulator" and config.overlap.staleness > 0:
        offload = False  # episodes stay open
    if config.task_entry.compares_answers:
        # A reference that scores once is gone when training begins.
        offload = None if role == "actor" else True if config.algorithm.dpo.precompute else offload
    shape, assumed = shape_of_role(config, role)
    spec = RoleSpec(
        name=role,
        on=on,
        offload=None if offload is None else "always" if offload else "never",
        can_offload=entry.parts,
        model=shape,
        model_assumed=assumed,
    )
    if entry.kind == "component":
        return replace(spec, memory=ComponentMemory(section.memory_gib))
    if entry.kind == "simulator":
        return replace(spec, memory=simulator_memory(config))
    if entry.kind == "engine":
        engine = engine_of(config, role)
        share = None if engine.memory_share is None else section.memory_share or engine.memory_share
        size, num_engines = section.tensor_parallel_size, section.num_engines
        memory = _engine_memory(config, role, engine)
        is_default = section.memory_share is None
        spec = replace(spec, share=share, is_share_default=is_default, memory=memory)
        return replace(spec, tensor_parallel=size, num_procs=num_engines)
    spec = replace(spec, tensor_parallel=config.train.tensor_parallel_size)
    if role in ("actor", "critic"):
        # Without rollouts the actor stays while a reference scores.
        can_offload = entry.parts if config.has_rollouts else frozenset()
        return replace(spec, can_offload=can_offload, memory=_train_memory(config, role))
    if role == "reference" and config.reference.engine is not None:
        return replace(spec, memory=_teacher_memory(config))
    return replace(spec, memory=_score_memory(config, role))


def _teacher_memory(config: Config) -> EngineMemory:
    """Return the memory settings of a teacher behind an engine, whose cache stays while its weights do."""
    num_bytes, length = _BYTES[dtype_of(config)], config.data.max_length
    return EngineMemory(
        max_tokens=length,
        slots=TEACHER_SLOTS,
        weight_bytes=num_bytes,
        kv_bytes=num_bytes,
        cuda_graphs=False,
        logit_rows=length,
    )


def _engine_memory(config: Config, role: str, engine: EngineEntry) -> EngineMemory:
    rollout, section, num_bytes = config.rollout, section_of_role(config, role), _BYTES[dtype_of(config)]
    is_policy = role == "rollout"
    return EngineMemory(
        max_tokens=config.data.max_length if is_policy else judge_length(config),
        slots=engine_slots(config, role),
        encodes_by_prompt=engine.encodes_by_prompt,
        expands_latent=engine.expands_latent,
        weight_bytes=num_bytes,
        kv_bytes=1 if is_policy and rollout.kv_cache_dtype else num_bytes,
        kept_prompts=engine.num_kept_prompts,
        layer_bytes=(1 if rollout.quantization else _nf4_bytes(config)) if is_policy else None,
        is_nf4=is_policy and config.train.load_in_4bit,
        cuda_graphs="enforce_eager" in engine.options and not section.enforce_eager,
        image_share=_image_share(config) if is_policy else 0.0,
    )


def _score_memory(config: Config, role: str) -> ForwardMemory:
    max_tokens, micro_batch = _score_batch(config)
    teachers = [shape.num_parameters for shape, _ in (_teachers(config) if role == "reference" else ())]
    return ForwardMemory(
        max_tokens=max_tokens,
        micro_batch=micro_batch,
        weight_bytes=_BYTES[dtype_of(config)],
        layer_bytes=_nf4_bytes(config) if role == "reference" and config.reference.model is None else None,
        is_sharded=not backend_of(config).has_zero_options or config.train.deepspeed.zero_stage == 3,
        packing=config.train.packing,
        sequence_parallel=config.train.sequence_parallel_size,
        is_guest=config.task_entry.compares_answers,
        num_waiting=sum(teachers) - min(teachers, default=0),  # while the smallest is on the device
        image_share=_image_share(config),
    )


def section_of_role(config: Config, role: str) -> Any:
    return config.components.get(role) or attrgetter(role_entry(role).section)(config)


def _train_memory(config: Config, role: str) -> TrainMemory:
    train = config.train
    compute = _BYTES[dtype_of(config)]
    backend = backend_of(config)
    has_master = train.fp32_master and compute < 4
    max_tokens, micro_batch = _batch(config, config.train)
    score_tokens, score_batch = _score_batch(config)
    pair = config.task_entry.sequences_per_row
    token_bytes, teacher_head = _of_teacher(config, compute) if role == "actor" else (0, 0)
    gradient_bytes, master_bytes = 4 if has_master else compute, 0
    if backend.has_masters_apart:
        gradient_bytes = _BYTES[train.deepspeed.grad_accum_dtype or dtype_of(config)]
        # Sharded, the optimizer steps a copy of the weights even in their dtype.
        master_bytes = 4 if has_master else compute if train.deepspeed.zero_stage > 0 else 0
    return TrainMemory(
        max_tokens=max_tokens,
        micro_batch=micro_batch,
        # In units of `max_tokens`, rounded up: a token budget counts as one long sequence.
        forward_micro_batch=-(-score_tokens * score_batch // max_tokens),
        backend=train.backend,
        zero_stage=train.deepspeed.zero_stage if backend.has_zero_options else 3,
        sequence_parallel=train.sequence_parallel_size,
        weight_bytes=4 if has_master and not backend.has_masters_apart else compute,
        compute_bytes=compute,
        gradient_bytes=gradient_bytes,
        master_bytes=master_bytes,
        moment_bytes=4 if train.fp32_master or compute == 4 else compute,
        has_muon=(config.critic if role == "critic" else config.actor).optimizer.kind == "muon",
        optimizer_offload=train.deepspeed.adam_offload,
        gradient_checkpointing=train.gradient_checkpointing,
        checkpointed_layers=num_checkpointed(config),
        is_whole=backend.has_zero_options and train.deepspeed.deepcompile,
        is_compiled=train.compile is not False and not train.liger_kernel and train.tensor_parallel_size == 1,
        packing=train.packing,
        sends_weights=config.has_rollouts and role == "actor",
        adapter_rank=train.lora.rank,
        layer_bytes=_nf4_bytes(config),
        batch_tokens=train.batch_size * pair * config.data.max_length,
        group_tokens=config.data.max_length * (config.rollout.samples_per_prompt if config.has_rollouts else pair),
        has_average=train.ema.enabled and role == "actor",
        image_share=_image_share(config),
        has_frozen_encoder=train.freeze_visual_encoder,
        has_snapshots=config.checkpoint.memory_every is not None,
        teacher_token_bytes=token_bytes,
        teacher_head=teacher_head,
    )


def _nf4_bytes(config: Config) -> float | None:
    """Return the bytes of a frozen weight in NF4, with its part of the scale of its block; None: there are none."""
    return 0.5 + _BYTES[dtype_of(config)] / NF4_BLOCK if config.train.load_in_4bit else None


def _of_teacher(config: Config, compute_bytes: int) -> tuple[int, int]:
    """Return the bytes of a teacher's distribution of one token, and the parameters of its head if that is needed."""
    distill = config.algorithm.distill
    if distill.coef == 0:
        return 0, 0
    if distill.top_k is not None:
        return distill.top_k * _TOP_BYTES, 0
    shape, _ = _shape_of(config.reference.model) if config.reference.model is not None else (None, None)
    return (0, 0) if shape is None else (shape.hidden_size * compute_bytes, shape.hidden_size * shape.vocab_size)


def _image_share(config: Config) -> float:
    """Return the largest share of a sequence's tokens that may stand for images.

    In RL only prompts have some, unless an environment shows more.
    """
    data = config.data
    if not has_images(config):
        return 0.0
    num_images = 1 if data.image_key is None else data.max_images_per_prompt  # a simulator shows one at a time
    only_prompts = config.has_rollouts and data.image_key is not None and not has_agent(config)
    tokens = min(prompt_max_length(config), data.max_length) if only_prompts else data.max_length
    shape, _ = shape_of_role(config, "actor")
    if shape is not None and shape.vision is not None:
        per_image = shape.vision.tokens_per_image or _tokens_per_image(config, shape.vision)
        if per_image is not None:
            tokens = min(tokens, num_images * per_image)
    return tokens / data.max_length


def _tokens_per_image(config: Config, vision: VisionShape) -> int | None:
    """Return the most tokens that stand for one image, where the processor of a local model bounds its pixels."""
    for name in ("processor_config.json", "preprocessor_config.json"):
        path = Path(str(config.actor.model)) / name
        written = json.loads(path.read_text()) if path.is_file() else {}
        settings = written.get("image_processor", written)
        max_pixels = settings.get("max_pixels") or (settings.get("size") or {}).get("longest_edge")
        is_qwen = str(settings.get("image_processor_type", "")).startswith("Qwen2VL")  # others bound edges
        if is_qwen and isinstance(max_pixels, int):
            pixels_of_patch = vision.patch_values // _QWEN_VALUES
            return -(-min(max_pixels, config.data.max_image_pixels) // (pixels_of_patch * vision.patches_per_token))
    return None


def _batch(config: Config, section: TrainConfig | RolloutConfig) -> tuple[int, int]:
    """Return (tokens of a sequence, sequences) of a micro-batch of updates or of scoring.

    A token budget counts as one sequence of that length if sequences are packed, else as several padded ones.
    """
    length = config.data.max_length
    budget = tokens_per_micro_batch(config, token_budget(section))
    if budget is not None:
        return (budget, 1) if config.train.packing else (length, -(-budget // length))
    # Where no budget is chosen yet, count the smallest micro-batch.
    num_rows = 1 if section.micro_batch_size == "auto" else section.micro_batch_size
    return length, num_rows * config.task_entry.sequences_per_row


def _score_batch(config: Config) -> tuple[int, int]:
    """Return (tokens of a sequence, sequences) of a micro-batch of scoring; outside rl, of an update."""
    return _batch(config, config.rollout if config.has_rollouts else config.train)


# The roles whose models a role's may be, the first that is named.
_SOURCES = {
    "critic": ("critic", "reward", "actor"),
    "reward": ("reward", "actor"),
    "reference": ("reference", "actor"),
    "judge": ("judge",),
    "env": (),
}


def _named(config: Config, role: str) -> tuple[str | None, Mapping[str, Any] | None]:
    """Return the name of a role's own model, and its shape as far as the config has it."""
    if role == "judge":
        return config.reward.judge.model, config.reward.judge.engine.shape
    section = section_of_role(config, role)
    return section.model, getattr(section, "shape", None)


def shape_of_role(config: Config, role: str) -> tuple[ModelShape | None, str | None]:
    """Return a role's model shape, and the public model that it is assumed to be where only its name is known."""
    if role == "reference" and config.reference.teachers:
        # The largest: there is one at a time on a device.
        return max(_teachers(config), key=lambda teacher: teacher[0].num_parameters, default=(None, None))
    sources: Sequence[str] = _SOURCES.get(role, () if role in config.components else ("actor",))
    for name, written in (_named(config, source) for source in sources):
        if written is not None:
            return _with_head(config, role, from_hf_config(written)), None
        if name is None:
            continue
        is_local = _local_config(name) is not None
        shape, assumed = _shape_of(name)
        if shape is not None:
            return _with_head(config, role, shape), assumed
        if is_local:  # `not_described` lists it
            return None, None
    return None, None


def _shape_of(name: str) -> tuple[ModelShape | None, str | None]:
    """Return the shape of a model, and the public model that it is assumed to be where only its name is known."""
    local = _local_config(name)
    if local is not None:
        try:
            return from_hf_config(local), None
        except PlacementError:
            return None, None
    return known_shape(name) or (None, None)


def _teachers(config: Config) -> list[tuple[ModelShape, str | None]]:
    """Return shape and assumed model of every teacher; none if one is unknown."""
    shapes = [_shape_of(name) for name in config.reference.teachers.values()]
    known = [(shape, assumed) for shape, assumed in shapes if shape is not None]
    return known if len(known) == len(shapes) else []


def _with_head(config: Config, role: str, shape: ModelShape) -> ModelShape:
    """Return the shape with a scalar head for value models, which have no output vocabulary."""
    return shape.with_scalar_head() if role in ("critic", "reward") or config.task_entry.has_scalar_head else shape


def _local_config(name: str) -> Mapping[str, object] | None:
    path = Path(name) / "config.json"
    if not path.is_file():
        return None
    try:
        model_config = json.loads(path.read_text())
    except ValueError as error:
        raise PlacementError(f"{path} is not JSON: {error}") from None
    if not isinstance(model_config, dict):
        raise PlacementError(f"{path} does not hold a model config")
    return model_config
