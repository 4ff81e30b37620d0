"""Weights whose masters lie in stretches on several ranks, gathered whole on each of them."""

from __future__ import annotations

import json
import os
import sys

import preloaded
import pytest
import torch
from rank_cases import meeting

pytestmark = pytest.mark.slow

# Two weights of two ranks: w is cut after its fourth element, v is the second rank's alone.
ONE_RANK = """
import json, torch
import torch.distributed as dist
from hotseat.train.zero_stages import ShardedWeights, WeightStretch

dist.init_process_group("gloo")
rank = dist.get_rank()
w = torch.tensor([1.0, -2.0, -0.0, 1e-40, float("inf"), 0.1])
v = torch.tensor([3.0, float("nan")])
owner = torch.cat([w[:4], torch.full((3,), 9.0)]) if rank == 0 else torch.cat([torch.full((2,), 9.0), w[4:], v])
pieces = {"w": WeightStretch(0, 4, owner)}
if rank == 1:
    pieces = {"w": WeightStretch(4, 2, owner, 2), "v": WeightStretch(0, 2, owner, 4)}
shapes = {"w": torch.Size([2, 3]), "v": torch.Size([2])}
parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}

def gathered(pieces, are_masters_sharded):
    weights = ShardedWeights(parameters, shapes, pieces, {}, None, torch.device("cpu"), are_masters_sharded)
    return {name: weight.view(torch.int32).tolist() for name, weight in weights.gather(["w", "v"], is_exact=True)}

whole = {"w": WeightStretch(0, 6, w), "v": WeightStretch(0, 2, v)}
print(json.dumps([gathered(pieces, True), gathered(whole, False)]))
dist.barrier()
"""


def test_every_rank_gets_the_stretches_of_all_bit_for_bit() -> None:
    """Minus zero, a subnormal number, infinity and a NaN too: a sum of floats would change some of them."""
    w = torch.tensor([1.0, -2.0, -0.0, 1e-40, float("inf"), 0.1]).view(2, 3)
    bits = {"w": w.view(torch.int32).tolist(), "v": torch.tensor([3.0, float("nan")]).view(torch.int32).tolist()}
    paths = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    with meeting(2) as environments:
        ranks = [
            preloaded.popen(
                [sys.executable, "-c", ONE_RANK],
                env={**os.environ, **paths, **own},
                stdout=preloaded.PIPE,
                stderr=preloaded.PIPE,
                text=True,
            )
            for own in environments
        ]
        for rank in ranks:
            out, error = rank.communicate(timeout=600)
            assert rank.returncode == 0, error
            # Where every rank has all masters, they are not added to each other.
            assert json.loads(out.splitlines()[-1]) == [bits, bits]
