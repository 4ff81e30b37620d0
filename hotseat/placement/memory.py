"""Estimates of a role's memory per device, and on the host per process."""

from __future__ import annotations

from dataclasses import replace

from hotseat.placement import memory_terms as assumed
from hotseat.placement.memory_settings import (
    ComponentMemory,
    EngineMemory,
    ForwardMemory,
    Layout,
    Memory,
    SimulatorMemory,
    TrainMemory,
)
from hotseat.placement.memory_terms import (
    ENCODER,
    FP32,
    GIB,
    Activity,
    Amount,
    RoleMemory,
    Term,
    amount,
    attention_mask,
    byte_term,
    delta_rule,
    digits,
    encoder_forward,
    fixed_terms,
    forward_terms,
    forward_width,
    held_parameters,
    logits,
    num_bytes,
    num_patches,
    per,
    pixels,
    process_on_host,
    tokens_of,
    total,
    weight_blocks,
    weight_terms,
    with_slack,
)
from hotseat.placement.role_names import Part
from hotseat.placement.shapes import ModelShape, VisionShape
from hotseat.registry.roles import role_entry


def estimate(role: str, memory: Memory | None, model: ModelShape | None, layout: Layout) -> RoleMemory | None:
    """Estimate a role's memory on one of its devices; None where its settings are not known."""
    role_memory: RoleMemory | None
    if isinstance(memory, SimulatorMemory) or (memory is None and role_entry(role).kind == "simulator"):
        role_memory = _simulator(role, memory, layout)
    elif isinstance(memory, ComponentMemory):
        role_memory = _component(role, memory, layout)
    elif memory is None or model is None:
        role_memory = None
    elif isinstance(memory, TrainMemory):
        role_memory = _train(role, memory, model, layout)
    elif isinstance(memory, ForwardMemory):
        role_memory = _forward(role, memory, model, layout)
    else:
        role_memory = _engine(role, memory, model, layout)
    if role_memory is None or layout.procs_per_device == 1:
        return role_memory
    return _times(role_memory, layout.procs_per_device)


def _times(memory: RoleMemory, count: int) -> RoleMemory:
    def each(terms: tuple[Term, ...]) -> tuple[Term, ...]:
        return tuple(replace(t, gib=t.gib * count, formula=f"{count} processes x ({t.formula})") for t in terms)

    return replace(
        memory,
        fixed=each(memory.fixed),
        parts={part: each(terms) for part, terms in memory.parts.items()},
        working={activity: each(terms) for activity, terms in memory.working.items()},
    )


# --- training ---------------------------------------------------------------------------------------------------------


def _train(role: str, memory: TrainMemory, model: ModelShape, layout: Layout) -> RoleMemory:
    tp = layout.tensor_parallel
    shards = max(1, layout.num_procs // tp)
    is_layer_cut = memory.facts.shards_by_layer and memory.zero_stage > 0
    weight_cut = shards if memory.is_sharded else 1
    gradient_cut = shards if memory.zero_stage >= 2 or is_layer_cut else 1
    optimizer_cut = shards if memory.zero_stage >= 1 else 1
    held = trained = held_parameters(model, tp)
    if memory.adapter_rank or (memory.has_frozen_encoder and model.vision is not None):
        trained = replace(amount(memory.num_trained(model), "parameters"), value=memory.num_trained(model) / tp)

    def share(name: str, size: int, cut: int, part: Part, of: Amount = trained) -> Term:
        return byte_term(role, name, (of * num_bytes(size)).over(cut, "ranks"), part)

    stored = memory.compute_bytes if memory.adapter_rank else memory.weight_bytes
    weights = weight_terms(role, model, tp, stored, weight_cut, memory.layer_bytes)
    if memory.adapter_rank:
        weights.append(share("adapters", memory.weight_bytes, weight_cut, Part.WEIGHTS))
    if _has_copies(memory, model, shards):
        copied = trained if memory.adapter_rank else held
        weights.append(share("16-bit copy of the weights", memory.compute_bytes, 1, Part.WEIGHTS, copied))
    gradients = share("gradients", memory.gradient_bytes, gradient_cut, Part.GRADIENTS)
    state = _optimizer_state(role, memory, model, trained, optimizer_cut)
    host = [process_on_host(role)]
    if memory.has_average:
        host.append(share("moving average (pinned)", FP32, optimizer_cut, Part.WEIGHTS))
    if memory.has_snapshots:
        host.append(_snapshots(role, memory, model, trained, optimizer_cut))
    parts = {Part.WEIGHTS: tuple(weights), Part.GRADIENTS: (gradients,), Part.OPTIMIZER: tuple(state)}
    if memory.optimizer_offload:
        host += [replace(term, name=f"{term.name} (pinned)") for term in state]
        parts[Part.OPTIMIZER] = tuple(replace(term, gib=0.0, formula="on the host") for term in state)
        if memory.facts.keeps_gradients and gradient_cut > 1:
            # ZeRO-Offload sends each reduced bucket to the host and keeps no gradient shard on the device.
            host.append(replace(gradients, name="gradients (pinned)"))
            parts[Part.GRADIENTS] = (replace(gradients, gib=0.0, formula="on the host"),)
    updating: tuple[Term, ...] = ()
    if not memory.facts.keeps_gradients:  # they exist only during an update, so they are working memory and no part
        updating = (_while_updating(role, memory, gradients, trained, gradient_cut, shards),)
        parts[Part.GRADIENTS] = (replace(gradients, gib=0.0, formula="only during an update"),)
    gathered = _gathered(role, memory, model, shards, tp)
    gathered += assumed.dequantised(role, model, memory.layer_bytes)
    so_far = [replace(gradients, name="gradients so far", part=None)] if memory.is_whole else []
    back = [*gathered, *_reduction(role, memory, model, shards, tp), *_backward(role, memory, model, tp), *so_far]
    back += logits(role, model, tokens_of(memory, memory.micro_batch), memory.compute_bytes, 2)
    back += _of_teacher(role, memory)
    step = _optimizer_step(role, memory, model, trained, optimizer_cut)
    batch = memory.forward_micro_batch or memory.micro_batch
    working: dict[Activity, tuple[Term, ...]] = {
        # Activations are freed before the optimizer steps, so the peak is the larger of the two.
        "train": (*updating, *with_slack(role, back if total(back) >= total(step) else step)),
        "forward": with_slack(role, gathered + forward_terms(role, model, memory, batch, memory.compute_bytes, tp)),
        "push": (*gathered, *_merging(role, memory, model, tp)),
        "receive": (weight_blocks(role, model, memory.compute_bytes),),
    }
    fixed = fixed_terms(role, layout, is_group=layout.num_procs > 1)
    if memory.sends_weights and layout.has_device:
        fixed += (weight_blocks(role, model, memory.compute_bytes, is_sending=True),)
    return RoleMemory(fixed, parts, working, tuple(host))


def _while_updating(role: str, memory: TrainMemory, gradients: Term, trained: Amount, cut: int, shards: int) -> Term:
    """Return the memory of gradients that exist only during an update."""
    if cut > 1 and memory.accumulates(shards // memory.sequence_parallel):
        # Only the last micro-batch sums them over ranks and shards them; until then they add up whole, in fp32.
        return byte_term(role, assumed.UNSHARDED_GRADIENTS, trained * num_bytes(FP32))
    return replace(gradients, part=None)


def _snapshots(role: str, memory: TrainMemory, model: ModelShape, trained: Amount, cut: int) -> Term:
    """Return the host memory of two snapshots of what a rank trains: weights, optimizer state and moving average."""
    size = memory.weight_bytes + FP32 * memory.has_average
    weights = byte_term(role, "weights", (trained * num_bytes(size)).over(cut, "ranks"))
    once = (weights, *_optimizer_state(role, memory, model, trained, cut))
    formula = " + ".join(term.formula for term in once)
    return Term(role, assumed.SNAPSHOTS, 2 * total(once), f"2 x ({formula})")


def _of_teacher(role: str, memory: TrainMemory) -> list[Term]:
    """Return the memory of a teacher's distributions of a micro-batch, and of its head, which every rank has whole."""
    terms = []
    if memory.teacher_token_bytes:
        tokens = amount(tokens_of(memory, memory.micro_batch), "tokens")
        terms.append(byte_term(role, "teacher's distributions", tokens * num_bytes(memory.teacher_token_bytes)))
    if memory.teacher_head:
        head = amount(memory.teacher_head, "parameters") * num_bytes(memory.compute_bytes)
        terms.append(byte_term(role, "teacher's head", head))
    return terms


def _optimizer_state(role: str, memory: TrainMemory, model: ModelShape, trained: Amount, cut: int) -> list[Term]:
    moments = trained * num_bytes(assumed.NUM_MOMENTS * memory.moment_bytes)
    if num_muon := memory.num_muon(model):
        of_adamw = amount(assumed.NUM_MOMENTS) * amount(memory.num_trained(model) - num_muon, "of AdamW")
        moments = (amount(num_muon) + of_adamw) * num_bytes(memory.moment_bytes)
    sizes = {"optimizer moments": moments}
    if memory.master_bytes:
        sizes["master weights"] = trained * num_bytes(memory.master_bytes)
    return [byte_term(role, name, size.over(cut, "ranks"), Part.OPTIMIZER) for name, size in sizes.items()]


def _has_copies(memory: TrainMemory, model: ModelShape, shards: int) -> bool:
    """Tell whether fp32 weights have copies to compute with: FSDP on a single rank keeps them, see `train.masters`."""
    is_small = memory.num_trained(model) <= assumed.COPIED_PARAMETERS
    return memory.facts.copies_weights and shards == 1 and memory.is_cast and is_small


def _gathered(role: str, memory: TrainMemory, model: ModelShape, shards: int, tp: int) -> list[Term]:
    """Return the memory of whole weights that exist beside the shard while the role works."""
    is_cut = memory.is_sharded and shards > 1
    if _has_copies(memory, model, shards) or not (is_cut or memory.is_cast):
        return []
    n, layer, rest = model.num_parameters, model.num_largest_layer_parameters, model.num_embedding_parameters
    if memory.zero_stage < 3:
        live = amount(n, "parameters")
    elif memory.facts.shards_by_layer:
        live = amount(rest, "outside the layers") + amount(assumed.FSDP_LIVE_LAYERS, "layers") * amount(layer)
        live = replace(live, value=min(n, live.value))
    else:
        live = amount(min(n, max(assumed.DEEPSPEED_LIVE_PARAMETERS, layer)), "live parameters")
    return [byte_term(role, "gathered weights", (live * num_bytes(memory.compute_bytes)).over(tp, "tensor parallel"))]


def _merging(role: str, memory: TrainMemory, model: ModelShape, tp: int) -> list[Term]:
    """Return the memory of merging adapters for a push: all adapters, and two copies of the largest weight, in fp32."""
    if not memory.adapter_rank:
        return []
    copies = amount(2) * amount(model.num_largest_matrix, "of the largest weight")
    merged = (amount(memory.num_trained(model), "adapters") + copies) * num_bytes(FP32)
    return [byte_term(role, "merging", merged.over(tp, "tensor parallel"))]


def _reduction(role: str, memory: TrainMemory, model: ModelShape, shards: int, tp: int) -> list[Term]:
    """Return the memory of gradients that are being reduced to the ranks that keep them."""
    if shards == 1 and not memory.is_whole:
        return []
    if memory.adapter_rank:
        reduced = amount(min(memory.num_trained(model), assumed.DEEPSPEED_BUCKET_ELEMENTS), "parameters")
    elif memory.facts.shards_by_layer and memory.zero_stage > 0:
        layer = model.num_largest_layer_parameters
        reduced = amount(model.num_embedding_parameters, "outside the layers")
        reduced += Amount(layer, f"one layer of {digits(layer)}")
    else:
        count = min(int(held_parameters(model, tp).value), assumed.DEEPSPEED_BUCKET_ELEMENTS)
        reduced = Amount(count, f"bucket of {digits(count)}")
        if memory.is_whole:  # one is filled while the other is sent, by one rank too
            reduced = amount(2) * reduced
    return [byte_term(role, "gradient reduction", reduced * num_bytes(memory.gradient_bytes))]


def layer_activation_bytes(model: ModelShape, compute_bytes: int, tp: int = 1) -> float:
    """Count the bytes that one layer keeps of one token for backward, with an attention kernel that stores no scores.

    Two norms keep their input in fp32 and their output; attention keeps q, k, v and its output; the gated MLP keeps
    gate, up, activation and product:  2 (4 + c) h + 2 c (q + kv) / tp + 4 c m / tp  bytes. (Counted from the layer's
    graph, as Korthikanti et al. 2022 do for GPT.) A gate of attention adds 2 c q; linear attention, whose rule is
    computed again, keeps 2 c channels + 6 v instead of attention's part (from what autograd kept of small models, in
    fp32 and bf16); layers of both kinds are averaged. Latent attention keeps queries, keys, what was made of the latent
    values, and its output, and of the norms of latent values their input in fp32, the normed input and the output.
    """
    c = compute_bytes
    norms = 2 * (FP32 + c) * model.hidden_size
    attention: float = 2 * c * ((1 + model.has_gated_attention) * model.q_size + model.kv_size)
    if (latent := model.latent) is not None:
        attention = c * (2 * latent.q_size + latent.made_size + latent.value_size)
        norms += (FP32 + 2 * c) * (latent.q_rank + latent.kv_rank)
    if model.linear is not None:
        linear = 2 * c * model.linear.channels + 6 * model.linear.value_size
        attention += (linear - attention) * model.num_linear_layers / model.num_layers
    return norms + (attention + 4 * c * model.mlp_width) / tp


def token_activation_bytes(memory: TrainMemory, model: ModelShape) -> float:
    """Count the bytes that all layers keep of one token for the backward pass, without a compiler.

    Where tokens may stand for images, the visual encoder's are counted for as many as may.
    """
    num_recomputed, layer = _num_recomputed(memory, model), layer_activation_bytes(model, memory.compute_bytes)
    kept = (model.num_layers - num_recomputed) * layer * assumed.EAGER_ACTIVATIONS
    if model.vision is not None and not memory.has_frozen_encoder:
        kept += memory.image_share * model.vision.patches_per_token * _patch_activations(memory, model.vision).value
    return num_recomputed * model.hidden_size * memory.compute_bytes + kept


def _num_recomputed(memory: TrainMemory, model: ModelShape) -> int:
    """Count the layers that keep their input alone and compute the rest again in the backward pass."""
    if not memory.gradient_checkpointing:
        return 0
    return model.num_layers if memory.checkpointed_layers is None else min(memory.checkpointed_layers, model.num_layers)


def _patch_activations(memory: TrainMemory, vision: VisionShape) -> Amount:
    """Count the bytes that the visual encoder keeps of one patch for the backward pass."""
    c, h, layers = memory.compute_bytes, vision.hidden_size, amount(vision.num_layers, "layers")
    layer = num_bytes(2 * (FP32 + c) * h + 4 * c * h + (4 if vision.is_gated else 2) * c * vision.intermediate_size)
    if memory.gradient_checkpointing:
        return layers * num_bytes(h * c) + layer * assumed.RECOMPUTE_PEAK
    return layers * layer * assumed.EAGER_ACTIVATIONS


def _backward(role: str, memory: TrainMemory, model: ModelShape, tp: int) -> list[Term]:
    """Return what a forward keeps for the backward pass. The visual encoder is not compiled."""
    c, num_tokens = memory.compute_bytes, tokens_of(memory, memory.micro_batch)
    tokens, layer = amount(num_tokens, "tokens"), num_bytes(layer_activation_bytes(model, c, tp))
    sizes: dict[str, Amount] = {}
    if num_recomputed := _num_recomputed(memory, model):
        width = num_bytes(model.hidden_size * c)
        sizes["checkpointed activations"] = tokens * amount(num_recomputed, "layers") * width
        sizes["recomputed layer"] = tokens * layer * assumed.RECOMPUTE_PEAK
    if num_kept := model.num_layers - num_recomputed:
        kept = assumed.COMPILED_ACTIVATIONS if memory.is_compiled else assumed.EAGER_ACTIVATIONS
        sizes["activations"] = tokens * amount(num_kept, "layers") * layer * kept
    terms = [byte_term(role, name, size) for name, size in sizes.items()]
    terms += delta_rule(role, model, num_tokens, 1.0)
    terms += attention_mask(role, memory, memory.micro_batch, c)
    num_image_tokens = memory.image_share * num_tokens
    if memory.has_frozen_encoder:
        terms += encoder_forward(role, model, num_image_tokens, c)
    elif model.vision is not None and num_image_tokens:
        patches = num_patches(num_image_tokens * model.vision.patches_per_token)
        terms += pixels(role, model, num_image_tokens)
        terms.append(byte_term(role, f"{ENCODER} activations", patches * _patch_activations(memory, model.vision)))
    return terms


def _optimizer_step(role: str, memory: TrainMemory, model: ModelShape, trained: Amount, cut: int) -> list[Term]:
    step = []
    if memory.facts.steps_at_once and not memory.optimizer_offload:  # a fused AdamW needs nothing but its state
        step = [byte_term(role, "optimizer step", (trained * num_bytes(assumed.STEP_BYTES)).over(cut, "ranks"))]
    if num_muon := memory.num_muon(model):
        matrix, copies = model.num_largest_matrix, assumed.MUON_COPIES
        bucket = min(num_muon, max(assumed.MUON_BUCKET_ENTRIES, 0 if memory.adapter_rank else matrix))
        largest = min(bucket, matrix)
        text = f"{digits(bucket)} entries x (2 + {FP32}) B + {digits(largest)} of the largest matrix x {copies} x 2 B"
        step.append(byte_term(role, "orthogonalisation", Amount(bucket * (2 + FP32) + largest * copies * 2, text)))
    return step


# --- scoring ----------------------------------------------------------------------------------------------------------


def _forward(role: str, memory: ForwardMemory, model: ModelShape, layout: Layout) -> RoleMemory:
    tp, size = layout.tensor_parallel, memory.weight_bytes
    shards = max(1, layout.num_procs // tp) if memory.is_sharded else 1
    weights = weight_terms(role, model, tp, size, shards, memory.layer_bytes)
    host = [] if memory.is_guest else [process_on_host(role)]
    if memory.num_waiting:
        waiting = amount(memory.num_waiting, "parameters") * num_bytes(size)
        text = waiting.text + per(tp * shards, "ranks")
        host.append(byte_term(role, "other models, waiting (pinned)", Amount(waiting.value / tp / shards, text)))
    terms: list[Term] = []
    if shards > 1:
        layers = assumed.FSDP_LIVE_LAYERS * model.num_largest_layer_parameters
        live = amount(min(model.num_parameters, model.num_embedding_parameters + layers), "live parameters")
        terms.append(byte_term(role, "gathered weights", (live * num_bytes(size)).over(tp, "tensor parallel")))
    terms += assumed.dequantised(role, model, memory.layer_bytes)
    terms += forward_terms(role, model, memory, memory.micro_batch, size, tp)
    working: dict[Activity, tuple[Term, ...]] = {
        "forward": with_slack(role, terms),
        "receive": (weight_blocks(role, model, size),),
    }
    fixed = () if memory.is_guest else fixed_terms(role, layout, is_group=shards > 1 or tp > 1)
    return RoleMemory(fixed, {Part.WEIGHTS: tuple(weights)}, working, tuple(host))


# --- engines, simulators and components -------------------------------------------------------------------------------


def kv_bytes_per_token(model: ModelShape, kv_bytes: int, tp: int = 1) -> float:
    """Count the bytes of one token's KV cache in all layers with one.

    With fewer heads than ranks, heads are copied; so are the latent values of latent attention.
    """
    if model.latent is not None:
        return model.num_layers * model.latent.cached_size * kv_bytes
    heads = max(1.0, model.num_kv_heads / tp)
    return 2 * (model.num_layers - model.num_linear_layers) * heads * model.head_dim * kv_bytes


def sequence_cache_bytes(memory: EngineMemory, model: ModelShape, tp: int = 1) -> float:
    """Count the bytes of a sequence of full length in an engine: its KV cache, and states of linear attention."""
    states = 0 if model.linear is None else model.linear.state_bytes
    return memory.max_tokens * kv_bytes_per_token(model, memory.kv_bytes, tp) + states


def useful_cache_gib(memory: EngineMemory, model: ModelShape, tp: int = 1) -> float:
    """Return the GiB beyond which an engine's cache is of no use."""
    return assumed.USEFUL_CACHE * memory.slots * sequence_cache_bytes(memory, model, tp) / GIB


def _engine(role: str, memory: EngineMemory, model: ModelShape, layout: Layout) -> RoleMemory | None:
    tp, has_share = layout.tensor_parallel, layout.share is not None
    if layout.has_device and has_share and layout.device_gib is None:
        return None  # a share of an unknown amount
    weights = _engine_weights(role, memory, model, tp)
    fixed = list(fixed_terms(role, layout, is_group=tp > 1))
    if memory.cuda_graphs and layout.has_device:
        graphs = amount(model.num_layers, "layers") * assumed.CUDA_GRAPH_GIB_PER_LAYER
        fixed.append(Term(role, "captured graphs", graphs.value, f"{graphs.text} GiB"))
    buffers = Term(role, "engine buffers", assumed.ENGINE_BUFFERS_GIB if layout.has_device else 0.0, "constant")
    num_shared = _image_prompt_tokens(memory, model, layout)
    num_tokens = max(num_shared, min(assumed.ENGINE_BATCH_TOKENS, memory.slots * memory.max_tokens))
    tokens = amount(num_tokens, "tokens") * num_bytes(forward_width(model, memory.weight_bytes, tp))
    num_rows, of = (memory.slots, "slots") if memory.logit_rows is None else (memory.logit_rows, "tokens")
    rows = Amount(num_rows, f"{num_rows} {of}") * amount(model.vocab_size)
    rows = (rows * num_bytes(memory.weight_bytes + FP32)).over(tp, "tensor parallel")
    if memory.is_nf4:  # gate and up are one layer
        [of_weight] = assumed.dequantised(role, model, memory.layer_bytes, num_fused=2)
        rows = Amount(rows.value + of_weight.gib * GIB, f"{rows.text} + {of_weight.formula}")
    workspace = byte_term(role, "engine workspace", Amount(tokens.value + rows.value, f"{tokens.text} + {rows.text}"))
    images = encoder_forward(role, model, _encoded_tokens(memory, num_shared), memory.weight_bytes)
    num_prefilled = min(num_tokens, max(memory.max_tokens, assumed.SHARED_FORWARD_TOKENS))
    images += delta_rule(role, model, num_prefilled, assumed.RULE_FORWARD)
    # Keys and values as they are computed, and cut into prompts.
    prompts = amount(2) * amount(num_shared, "tokens") * num_bytes(kv_bytes_per_token(model, memory.kv_bytes, tp))
    prefilled = [byte_term(role, "KV cache of prompts", prompts)] if num_shared else []
    prefilled += _expanded(role, memory, model)
    # The share covers weights, cache, buffers and workspace; context and graphs come on top.
    rest = total(weights) + buffers.gib + workspace.gib + total(images)
    cache, min_share = _engine_cache(role, memory, model, layout, rest)
    working: dict[Activity, tuple[Term, ...]] = {
        "generate": (workspace, *images, *prefilled),
        "forward": (workspace, *images),
        "receive": (weight_blocks(role, model, memory.weight_bytes),),
    }
    parts = {Part.WEIGHTS: tuple(weights), Part.KV_CACHE: (cache,)}
    return RoleMemory((*fixed, buffers), parts, working, (process_on_host(role),), min_share)


def _expanded(role: str, memory: EngineMemory, model: ModelShape) -> list[Term]:
    """Return the memory of keys and values that a step makes, in one layer, of all latent values in the cache."""
    if model.latent is None or not memory.expands_latent:
        return []
    tokens = Amount(memory.slots, f"{memory.slots} slots") * amount(memory.max_tokens, "tokens")
    made = (model.latent.q_size + model.latent.made_size) * memory.weight_bytes
    return [byte_term(role, "keys and values of latent ones", tokens * num_bytes(made))]


def _engine_weights(role: str, memory: EngineMemory, model: ModelShape, tp: int) -> list[Term]:
    in_layers = 0 if memory.layer_bytes is None else model.num_matrix_parameters
    plain = model.num_parameters - model.num_vision_parameters - in_layers
    sizes: list[tuple[str, int, float]] = [("weights", plain, memory.weight_bytes)]
    if memory.layer_bytes is not None:
        sizes.append(("weights of layers", in_layers, memory.layer_bytes))
    if model.vision is not None:
        sizes.append((ENCODER, model.num_vision_parameters, memory.weight_bytes))
    return [
        byte_term(role, name, (amount(n, "parameters") * num_bytes(size)).over(tp, "tensor parallel"), Part.WEIGHTS)
        for name, n, size in sizes
    ]


def _image_prompt_tokens(memory: EngineMemory, model: ModelShape, layout: Layout) -> int:
    """Count the tokens of prompts with images that share a forward of the engine's own layers; 0: it has none."""
    is_llava = model.vision is not None and model.vision.tokens_per_image is not None
    if not is_llava or not memory.image_share or not memory.encodes_by_prompt or not layout.has_device:
        return 0
    return max(memory.max_tokens, min(assumed.SEEN_FORWARD_TOKENS, memory.slots * memory.max_tokens))


def _encoded_tokens(memory: EngineMemory, num_shared: int) -> float:
    """Count the tokens that stand for the images which are encoded at a time."""
    if memory.encodes_by_prompt:
        return memory.image_share * max(memory.max_tokens, assumed.SHARED_FORWARD_TOKENS, num_shared)
    of_prompt = memory.image_share * memory.max_tokens
    return max(of_prompt, min(assumed.ENGINE_BATCH_TOKENS, memory.slots * of_prompt))


def _engine_cache(
    role: str, memory: EngineMemory, model: ModelShape, layout: Layout, rest_gib: float
) -> tuple[Term, float | None]:
    """Return the memory of the KV cache beside the rest of the engine, and the least share to start with."""
    per_token = kv_bytes_per_token(model, memory.kv_bytes, layout.tensor_parallel)
    sequence = f"{digits(memory.max_tokens)} tokens x {digits(per_token)} B"
    if model.linear is not None:
        sequence = f"({sequence} + {digits(model.linear.state_bytes)} B of states)"
        per_token = sequence_cache_bytes(memory, model, layout.tensor_parallel) / memory.max_tokens
    one = sequence_cache_bytes(memory, model, layout.tensor_parallel) / GIB
    if layout.share is None or layout.device_gib is None:
        kept = memory.kept_prompts
        sequences = f"({memory.slots} slots + {kept} prompts)" if kept else f"{memory.slots} slots"
        return Term(role, "kv cache", (memory.slots + kept) * one, f"{sequences} x {sequence}", Part.KV_CACHE), None
    left = layout.share * layout.device_gib - rest_gib
    useful = useful_cache_gib(memory, model, layout.tensor_parallel)
    held = int(max(left, 0.0) * GIB / per_token)
    formula = (
        f"{layout.share:g} x {layout.device_gib:g} GiB - {rest_gib:.2f} GiB (weights, buffers, workspace)"
        f" = {digits(held)} tokens of {digits(per_token)} B"
    )
    if left > useful:
        slots = f"{assumed.USEFUL_CACHE} x {memory.slots} slots"
        formula = f"{slots} x {sequence}, less than the share of {layout.share:g} allows"
    cache = Term(role, "kv cache", max(min(left, useful), one), formula, Part.KV_CACHE)
    return cache, (rest_gib + one) / layout.device_gib


def _simulator(role: str, memory: SimulatorMemory | None, layout: Layout) -> RoleMemory | None:
    fixed = fixed_terms(role, layout, is_group=False)
    if memory is not None:
        state = Term(role, "simulator", memory.gib, memory.source, Part.SIMULATOR)
    elif layout.share is not None and layout.device_gib is not None:
        gib = max(0.0, layout.share * layout.device_gib - total(fixed))
        formula = f"{layout.share:g} x {layout.device_gib:g} GiB - {total(fixed):.2f} GiB (context)"
        state = Term(role, "simulator", gib, formula, Part.SIMULATOR)
    else:
        return None
    return RoleMemory(fixed, {Part.SIMULATOR: (state,)}, {}, (process_on_host(role),))


def _component(role: str, memory: ComponentMemory, layout: Layout) -> RoleMemory:
    state = (Term(role, "component", memory.gib, "as given", Part.WEIGHTS),) if memory.gib else ()
    fixed = fixed_terms(role, layout, is_group=False) if memory.gib else ()
    return RoleMemory(fixed, {Part.WEIGHTS: state}, {}, (process_on_host(role),))
