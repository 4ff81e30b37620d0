# mypy: ignore-errors
"""The digest on a GPU in one pass: each element is read once, widened in a register, weighed and added.

Everything is int64 that wraps, so the order of the additions, and of the atomics, changes no bit.
"""

import torch
import triton
import triton.language as tl

_ROWS = 16  # of a program; its loop is unrolled, so that as many loads are under way at once
_COLUMNS = 1024


@triton.jit
def _kernel(
    bits,  # [num_rows, num_columns] integers of any width
    rows,  # [num_rows] int64
    columns,  # [num_columns] int64
    total,  # [] int64
    num_rows,
    num_columns,
    num_column_blocks,
    row_stride,
    column_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    program = tl.program_id(0)
    # 64 bits from here on: a tensor may have more than 2^31 elements.
    first_row = (program // num_column_blocks).to(tl.int64) * BLOCK_ROWS
    column = (program % num_column_blocks).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_column = column < num_columns
    sums = tl.zeros([BLOCK_COLUMNS], dtype=tl.int64)
    for i in tl.static_range(BLOCK_ROWS):
        row = first_row + i
        is_row = row < num_rows
        place = bits + row * row_stride + column * column_stride
        value = tl.load(place, mask=is_column & is_row, other=0).to(tl.int64)
        sums += value * tl.load(rows + row, mask=is_row, other=0)
    weights = tl.load(columns + column, mask=is_column, other=0)
    tl.atomic_add(total, tl.sum(sums * weights, axis=0))


def add_digest(bits: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, total: torch.Tensor) -> None:
    """total += sum over r, c of bits[r, c] * rows[r] * columns[c], mod 2^64. All on one CUDA device."""
    num_rows, num_columns = bits.shape
    block_columns = min(_COLUMNS, triton.next_power_of_2(num_columns))
    num_column_blocks = triton.cdiv(num_columns, block_columns)
    num_programs = triton.cdiv(num_rows, _ROWS) * num_column_blocks
    with torch.cuda.device(bits.device):
        _kernel[(num_programs,)](
            bits,
            rows,
            columns,
            total,
            num_rows,
            num_columns,
            num_column_blocks,
            bits.stride(0),
            bits.stride(1),
            BLOCK_ROWS=_ROWS,
            BLOCK_COLUMNS=block_columns,
        )
