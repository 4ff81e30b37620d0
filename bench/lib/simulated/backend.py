"""A stand-in for a training backend: it computes losses of made-up log-probs, and takes as long as an update would."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotseat.algorithms.adapters import WeightForm
from hotseat.algorithms.digest import tensor_digest
from hotseat.placement.role_names import Part
from hotseat.train.backend import Loss, Outputs, TrainOptions, UpdateReport
from hotseat.train.update_facts import add_up
from hotseat.types import MicroBatch, Moved
from lib.simulated.costs import PUSH_S, SCORED_TOKEN_S, TRAINED_TOKEN_S, spend
from lib.simulated.engine import LOG_PROB

NUM_WEIGHTS = 64  # elements of the only tensor
NOTHING_MOVED = Moved(0, 0, 0.0)


class SimulatedBackend:
    """One rank. The others are not asked: each takes its own facts for those of all."""

    name = "simulated"
    is_padded = False
    movable: frozenset[Part] = frozenset()

    def __init__(self, model: Any, options: TrainOptions, *, device: str | torch.device = "cpu"):
        self.version = 0
        self._learning_rate = options.schedule.peak

    @classmethod
    def check(cls, options: TrainOptions) -> None:
        pass

    def gather_facts(self, fact: Any, what: str, *, of_every_rank: bool = False) -> list[Any]:
        return [fact]

    def log_probs(self, micro_batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        spend(sum(batch.num_tokens for batch in micro_batches) * SCORED_TOKEN_S)
        return [torch.where(batch.mask, LOG_PROB, 0.0) for batch in micro_batches]

    def update(self, micro_batches: Sequence[MicroBatch], loss: Loss, temperature: float) -> UpdateReport:
        metrics, total = [], 0.0
        for batch in micro_batches:
            log_probs = torch.where(batch.mask, LOG_PROB, 0.0)
            value, measured = loss(Outputs(log_probs=log_probs, entropy=torch.zeros_like(log_probs)), batch)
            total += float(value)
            metrics.append(
                {name: each.tolist() if isinstance(each, Tensor) else each for name, each in measured.items()}
            )
        num_tokens = sum(batch.num_tokens for batch in micro_batches)
        spend(num_tokens * TRAINED_TOKEN_S)
        self.version += 1
        return UpdateReport(
            version=self.version,
            loss=total,
            grad_norm=1.0,
            learning_rate=self._learning_rate,
            is_skipped=False,
            num_skipped=0,
            num_tokens=num_tokens,
            num_sampled=sum(int(batch.mask.sum()) for batch in micro_batches),
            metrics=add_up(metrics),
        )

    def fits(self, num_tokens: int, max_length: int, *, is_update: bool, with_entropy: bool = False) -> bool:
        return True

    def warm_up(self, max_length: int) -> None:
        pass

    def offload(self, parts: Collection[Part]) -> Moved:
        return NOTHING_MOVED

    def onload(self, parts: Collection[Part]) -> Moved:
        return NOTHING_MOVED

    def weights(
        self, *, dtype: torch.dtype | None = None, bucket_bytes: int = 2**28, form: WeightForm = "merged"
    ) -> Iterator[tuple[str, Tensor]]:
        spend(PUSH_S)
        yield "weight", self._weight(dtype)

    def digest(self, *, dtype: torch.dtype | None = None, form: WeightForm = "merged") -> dict[str, int]:
        return {"weight": tensor_digest(self._weight(dtype))}

    def _weight(self, dtype: torch.dtype | None) -> Tensor:
        return torch.full([NUM_WEIGHTS], float(self.version), dtype=dtype or torch.float32)

    def take_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        for _ in named_tensors:
            pass

    def save(self, directory: str | Path) -> None:
        pass

    def snapshot(self, directory: str | Path) -> None:
        pass

    def is_written(self) -> bool:
        return True

    def saved_bytes(self) -> int:
        return 0

    def load(self, directory: str | Path) -> None:
        pass

    def averaged(self) -> AbstractContextManager[None]:
        return nullcontext()

    def without_adapters(self) -> AbstractContextManager[None]:
        return nullcontext()

    def export(self, directory: str | Path, *, dtype: torch.dtype | None = None, facts: Mapping[str, Any] = {}) -> None:
        Path(directory, "config.json").write_text(json.dumps({"simulated": True}))

    def close(self) -> None:
        pass
