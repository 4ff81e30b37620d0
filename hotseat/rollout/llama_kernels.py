# mypy: ignore-errors
"""Triton kernels for what a Llama-like layer computes between matrix products: norms, rotations, attention, activation.

Each reads its inputs and writes its outputs once, and computes in float32. Numbers are rounded to the model's type
where a comment says so, and when they are stored.
"""

import torch
import triton
import triton.language as tl

_COLUMNS = 1024  # of a row of gates that one program computes at most
_MANY_ROWS = 1024  # from which on a program rotates 16 heads instead of 4: there are programs enough for the device
_MANY_PROGRAMS = 512  # that keep a device busy
_MAX_SPLITS = 16  # of the keys of one sequence


@triton.jit
def _rms_norm_kernel(x, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_column = column < SIZE
    value = tl.load(x + row * SIZE + column, mask=is_column, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    # Rounded as transformers does: to the model's type before the product with the weight.
    normed = (value * scale).to(out.dtype.element_ty).to(tl.float32)
    normed *= tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, normed.to(out.dtype.element_ty), mask=is_column)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide rows by their root mean square, then multiply by the weight: [rows, size], [size] -> [rows, size]."""
    x = x.contiguous()
    size = x.shape[-1]
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    with torch.cuda.device_of(x):
        _rms_norm_kernel[(x.numel() // size,)](
            x, weight, out, eps, SIZE=size, BLOCK=block, num_warps=min(16, max(1, block // 512))
        )
    return out


@triton.jit
def _rotate_kernel(
    qkv,  # [rows, NUM_HEADS + 2 * NUM_KV, 2 * HALF]
    positions,  # [rows] int64
    cos,  # [max_keys, 2 * HALF]
    sin,  # as cos, with the first half negated
    q_weight,  # [2 * HALF], with HAS_NORMS
    k_weight,
    q_eps,
    k_eps,
    keys,  # [slots, NUM_KV, max_keys, 2 * HALF], with HAS_CACHE
    values,
    max_keys,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    # 64 bits from here on: a product or a cache may have more than 2^31 elements.
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_HALF)[None, :]
    is_column = column < HALF
    is_query = head < NUM_HEADS
    is_rotated = head < NUM_HEADS + NUM_KV
    is_read = is_column & (head < NUM_HEADS + (2 * NUM_KV if HAS_CACHE else NUM_KV))

    place = qkv + (row * (NUM_HEADS + 2 * NUM_KV) + head) * (2 * HALF) + column
    low = tl.load(place, mask=is_read, other=0.0).to(tl.float32)
    high = tl.load(place + HALF, mask=is_read, other=0.0).to(tl.float32)
    rotated_low, rotated_high = low, high
    if HAS_NORMS:
        squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        scale = tl.rsqrt(squares[:, None] / (2 * HALF) + tl.where(is_query, q_eps, k_eps))
        weight_low = tl.where(
            is_query,
            tl.load(q_weight + column, mask=is_column, other=0.0).to(tl.float32),
            tl.load(k_weight + column, mask=is_column, other=0.0).to(tl.float32),
        )
        weight_high = tl.where(
            is_query,
            tl.load(q_weight + HALF + column, mask=is_column, other=0.0).to(tl.float32),
            tl.load(k_weight + HALF + column, mask=is_column, other=0.0).to(tl.float32),
        )
        # Rounded as by `rms_norm`.
        rotated_low = (low * scale).to(qkv.dtype.element_ty).to(tl.float32) * weight_low
        rotated_high = (high * scale).to(qkv.dtype.element_ty).to(tl.float32) * weight_high
        rotated_low = rotated_low.to(qkv.dtype.element_ty).to(tl.float32)
        rotated_high = rotated_high.to(qkv.dtype.element_ty).to(tl.float32)

    # Rounded once, when stored; torch's products and sums round twice.
    angle = position * (2 * HALF) + column
    cos_low = tl.load(cos + angle, mask=is_column, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + angle + HALF, mask=is_column, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + angle, mask=is_column, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + angle + HALF, mask=is_column, other=0.0).to(tl.float32)
    new_low = tl.where(is_rotated, rotated_low * cos_low + rotated_high * sin_low, low).to(qkv.dtype.element_ty)
    new_high = tl.where(is_rotated, rotated_high * cos_high + rotated_low * sin_high, high).to(qkv.dtype.element_ty)

    is_kept = is_read & is_query if HAS_CACHE else is_read
    tl.store(place, new_low, mask=is_kept)
    tl.store(place + HALF, new_high, mask=is_kept)
    if HAS_CACHE:
        kv_head = tl.where(is_rotated, head - NUM_HEADS, head - NUM_HEADS - NUM_KV)
        target = ((row * NUM_KV + kv_head) * max_keys + position) * (2 * HALF) + column
        is_key = is_read & is_rotated & (head >= NUM_HEADS)
        is_value = is_read & (head >= NUM_HEADS + NUM_KV)
        tl.store(keys + target, new_low, mask=is_key)
        tl.store(keys + target + HALF, new_high, mask=is_key)
        tl.store(values + target, new_low, mask=is_value)
        tl.store(values + target + HALF, new_high, mask=is_value)


def rotate(
    qkv: torch.Tensor,
    num_heads: int,
    positions: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, float, torch.Tensor, float] | None = None,
    cache: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Rotate queries and keys where they are, or keys and values into a cache.

    qkv: [rows, num_heads + 2 * kv_heads, dim], contiguous. positions: [rows] int64. angles: cosines and sines, each
    [max_keys, dim], with the first half of the sines negated. norms: weight and epsilon of the norm of query heads, and
    of key heads, which comes before. cache: keys and values, each [slots, kv_heads, max_keys, dim], where row r writes
    to slot r at its position; the keys in `qkv` stay as they were.
    """
    rows, heads, dim = qkv.shape
    num_kv = (heads - num_heads) // 2
    q_weight, q_eps, k_weight, k_eps = norms or (qkv, 0.0, qkv, 0.0)
    keys, values = cache or (qkv, qkv)
    block_half = triton.next_power_of_2(dim // 2)
    block_heads = 4 if rows < _MANY_ROWS else 16
    num_changed = heads if cache is not None else num_heads + num_kv
    with torch.cuda.device_of(qkv):
        _rotate_kernel[(rows, triton.cdiv(num_changed, block_heads))](
            qkv,
            positions,
            *angles,
            q_weight,
            k_weight,
            q_eps,
            k_eps,
            keys,
            values,
            keys.shape[2],
            NUM_HEADS=num_heads,
            NUM_KV=num_kv,
            HALF=dim // 2,
            HAS_NORMS=norms is not None,
            HAS_CACHE=cache is not None,
            BLOCK_HEADS=block_heads,
            BLOCK_HALF=block_half,
            # Every element belongs to one thread: a second one could read what the first has written already.
            num_warps=min(4, max(1, block_heads * block_half // 256)),
        )


@triton.jit
def _silu_product_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    # 64 bits: a prefill's product may have more than 2^31 elements.
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < SIZE
    place = gate_up + row * (2 * SIZE) + column
    gate = tl.load(place, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(place + SIZE, mask=is_column, other=0.0).to(tl.float32)
    # Rounded to the model's type before the product, as by torch.
    activated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + column, (activated * up).to(out.dtype.element_ty), mask=is_column)


def silu_product(gate_up: torch.Tensor) -> torch.Tensor:
    """Multiply silu of the first half of each row by the second: [rows, 2 * size], contiguous -> [rows, size]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    block = min(_COLUMNS, triton.next_power_of_2(size))
    with torch.cuda.device_of(gate_up):
        _silu_product_kernel[(rows, triton.cdiv(size, block))](gate_up, out, SIZE=size, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _attend_kernel(
    qkv,  # [rows, heads, DIM], of which the first NUM_KV * GROUPS heads are queries
    positions,  # [rows] int64
    keys,  # [slots, NUM_KV, max_keys, DIM]
    values,
    out,  # [rows, NUM_KV * GROUPS, DIM]; with SPLITS > 1 [rows, NUM_KV * GROUPS, SPLITS, DIM] float32
    stats,  # [rows, NUM_KV * GROUPS, SPLITS, 2] float32: maximum and sum of the weights; with SPLITS > 1
    row_stride,
    max_keys,
    scale,
    NUM_KV: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # 64 bits: a cache may have more than 2^31 elements.
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_keys = tl.load(positions + row).to(tl.int32) + 1
    span = tl.cdiv(tl.cdiv(num_keys, SPLITS), BLOCK_KEYS) * BLOCK_KEYS
    start = split * span
    end = tl.minimum(num_keys, start + span)

    group = tl.arange(0, BLOCK_GROUPS)
    column = tl.arange(0, BLOCK_DIM)[None, :]
    head = kv_head * GROUPS + group
    is_query = (group < GROUPS)[:, None] & (column < DIM)
    query = tl.load(qkv + row * row_stride + head[:, None] * DIM + column, mask=is_query, other=0.0)
    first = (row * NUM_KV + kv_head) * max_keys * DIM
    highest = tl.full([BLOCK_GROUPS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_GROUPS], tl.float32)
    attended = tl.zeros([BLOCK_GROUPS, BLOCK_DIM], tl.float32)
    for at in range(start, end, BLOCK_KEYS):
        key = at + tl.arange(0, BLOCK_KEYS)
        is_key = key < end
        place = first + key[:, None] * DIM + column
        is_there = is_key[:, None] & (column < DIM)
        score = tl.dot(query, tl.trans(tl.load(keys + place, mask=is_there, other=0.0)), input_precision=PRECISION)
        score = tl.where(is_key[None, :], score * scale, float("-inf"))
        raised = tl.maximum(highest, tl.max(score, axis=1))
        weight = tl.exp(score - raised[:, None])
        kept = tl.exp(highest - raised)
        total = total * kept + tl.sum(weight, axis=1)
        value = tl.load(values + place, mask=is_there, other=0.0)
        # Rounded to the model's type, as by torch's fused attention.
        attended = attended * kept[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
        highest = raised

    place = (row * (NUM_KV * GROUPS) + head) * SPLITS + split
    if SPLITS == 1:
        attended = (attended / total[:, None]).to(out.dtype.element_ty)
    else:
        tl.store(stats + 2 * place, highest, mask=group < GROUPS)
        tl.store(stats + 2 * place + 1, total, mask=group < GROUPS)
    tl.store(out + place[:, None] * DIM + column, attended, mask=is_query)


@triton.jit
def _merge_kernel(
    parts,  # [rows, SPLITS, DIM] float32
    stats,  # [rows, SPLITS, 2] float32
    out,  # [rows, DIM]
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = row * SPLITS + tl.arange(0, SPLITS)
    column = tl.arange(0, BLOCK_DIM)
    highest = tl.load(stats + 2 * split)
    share = tl.exp(highest - tl.max(highest, axis=0))  # 0 where a split has no keys
    total = tl.sum(tl.load(stats + 2 * split + 1) * share, axis=0)
    part = tl.load(parts + split[:, None] * DIM + column[None, :], mask=(column < DIM)[None, :], other=0.0)
    attended = tl.sum(part * share[:, None], axis=0) / total
    tl.store(out + row * DIM + column, attended.to(out.dtype.element_ty), mask=column < DIM)


def attend(
    qkv: torch.Tensor, num_heads: int, positions: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Attend from one query per slot to the keys of its slot, up to its position.

    qkv: [rows, num_heads + 2 * kv_heads, dim], contiguous, of which queries are read. positions: [rows] int64. cache:
    keys and values, each [slots, kv_heads, max_keys, dim]; row r reads slot r. -> [rows, num_heads * dim].

    Where rows are few, the keys of each are split over several programs, whose results are merged.
    """
    rows, heads, dim = qkv.shape
    num_kv = (heads - num_heads) // 2
    keys, values = cache
    num_splits = min(_MAX_SPLITS, triton.next_power_of_2(triton.cdiv(_MANY_PROGRAMS, rows * num_kv)))
    block_dim = max(16, triton.next_power_of_2(dim))
    out = qkv.new_empty(rows, num_heads * dim)
    parts, stats = out, out
    if num_splits > 1:
        parts = qkv.new_empty(rows, num_heads, num_splits, dim, dtype=torch.float32)
        stats = qkv.new_empty(rows, num_heads, num_splits, 2, dtype=torch.float32)
    with torch.cuda.device_of(qkv):
        _attend_kernel[(rows, num_kv, num_splits)](
            qkv,
            positions,
            keys,
            values,
            parts,
            stats,
            qkv.stride(0),
            keys.shape[2],
            dim**-0.5,
            NUM_KV=num_kv,
            GROUPS=num_heads // num_kv,
            DIM=dim,
            SPLITS=num_splits,
            BLOCK_GROUPS=max(16, triton.next_power_of_2(num_heads // num_kv)),
            BLOCK_KEYS=64,
            BLOCK_DIM=block_dim,
            PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
            num_warps=4,
            num_stages=3,
        )
        if num_splits > 1:
            _merge_kernel[(rows * num_heads,)](parts, stats, out, DIM=dim, SPLITS=num_splits, BLOCK_DIM=block_dim)
    return out
