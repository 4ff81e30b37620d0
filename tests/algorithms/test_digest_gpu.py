"""The digest on a CUDA device: the fused kernel and the eager path give the CPU's bits."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from hotseat.algorithms import digest
from hotseat.algorithms.digest import combine_digests, named_digests, tensor_digest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [
    (),
    (1,),
    (7,),
    (1023,),
    (1024,),
    (1025,),
    (70_001,),
    (1, 1),
    (1, 5000),
    (5000, 1),
    (15, 1024),
    (16, 1024),
    (17, 1025),
    (300, 3),
    (257, 2049),
    (2, 3, 4),
    (5, 33, 65),
    (3, 2, 1, 40),
    (0,),
    (3, 0),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool]


def need_kernel() -> None:
    pytest.importorskip("triton")
    assert digest._fused() is not None


@pytest.fixture(params=["fused", "eager"])
def path(request, monkeypatch) -> None:
    if request.param == "eager":
        monkeypatch.setattr(digest, "_fused", lambda: None)
    else:
        need_kernel()


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Every bit pattern, NaNs and negative integers too."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    width = torch.empty((), dtype=dtype).element_size()
    num_bytes = width * torch.Size(shape).numel()
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).view(dtype).view(shape)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_gpu_gives_the_bits_of_the_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = random_bits(shape, dtype)
    assert tensor_digest(tensor.cuda()) == tensor_digest(tensor)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_views_give_the_bits_of_what_they_show(dtype: torch.dtype) -> None:
    tensor = random_bits((67, 130), dtype)
    cube = random_bits((9, 40, 21), dtype)
    views = [
        lambda t, c: t.t(),
        lambda t, c: t[:, 64:],
        lambda t, c: t[1::2, ::3],
        lambda t, c: t.t()[5:, 1::4],
        lambda t, c: t[3],
        lambda t, c: t[:, 3],
        lambda t, c: t[:1].expand(5, -1),
        lambda t, c: c.permute(2, 0, 1),
        lambda t, c: c.permute(1, 2, 0)[2:, :, 1:],
        lambda t, c: c[:, ::2, 3:-1],
    ]
    for view in views:
        here, there = view(tensor, cube), view(tensor.cuda(), cube.cuda())
        assert tensor_digest(there) == tensor_digest(here) == tensor_digest(here.contiguous())


@pytest.mark.usefixtures("path")
def test_slices_with_offset_and_stride_add_up() -> None:
    tensor = random_bits((50, 1300), torch.bfloat16)
    there = tensor.cuda()
    whole = tensor_digest(tensor)
    quarters = [
        tensor_digest(there[:20, :700]),
        tensor_digest(there[20:, :700], offset=(20, 0)),
        tensor_digest(there[:20, 700:], offset=(0, 700)),
        tensor_digest(there[20:, 700:], offset=(20, 700)),
    ]
    assert combine_digests(quarters) == whole
    interleaved = [tensor_digest(there[:, i::3], offset=(0, i), stride=(1, 3)) for i in range(3)]
    assert combine_digests(interleaved) == whole


@pytest.mark.usefixtures("path")
def test_many_at_once_equal_one_by_one() -> None:
    named = {str(shape): random_bits(shape, torch.bfloat16) for shape in SHAPES}
    there = {name: tensor.cuda() for name, tensor in named.items()}
    assert named_digests(there.items()) == named_digests(named.items())


def test_more_elements_than_32_bits_count() -> None:
    need_kernel()
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB")
    num_rows, num_columns = 40_000, 60_000  # 2.4e9 > 2^31
    tensor = torch.zeros(num_rows, num_columns, dtype=torch.int8, device="cuda")
    tensor[-1, -1] = 3
    last = torch.full((1, 1), 3, dtype=torch.int8)
    assert tensor_digest(tensor) == tensor_digest(last, offset=(num_rows - 1, num_columns - 1))


def test_the_weights_of_a_small_model_take_less_than_40_ms(capsys: pytest.CaptureFixture[str]) -> None:
    """0.3% of a step of 8 s: 28 layers of a 1.5B model in bf16, 3 GB."""
    need_kernel()
    layer = [(1536, 1536), (256, 1536), (256, 1536), (1536, 1536), *[(8960, 1536)] * 2, (1536, 8960)]
    shapes = [*[shape for _ in range(28) for shape in (*layer, *[(1536,)] * 5)], (151_936, 1536)]
    named = [(str(i), torch.randn(s, device="cuda", dtype=torch.bfloat16)) for i, s in enumerate(shapes)]
    num_bytes = sum(tensor.nbytes for _, tensor in named)
    named_digests(named)  # compiles
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(5):
        started_s = time.perf_counter()
        named_digests(named)
        best = min(best, time.perf_counter() - started_s)
    with capsys.disabled():
        print(f"\ndigest of {num_bytes / 1e9:.2f} GB: {best * 1e3:.1f} ms, {num_bytes / 1e9 / best:.0f} GB/s")
    assert best < 0.040
