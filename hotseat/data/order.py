"""The order of prompts, which follows from the seed alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np

from hotseat.data.pairs import Pair
from hotseat.errors import DataError


class PromptOrder:
    """Passes over the prompts, each in another order; the rest of a pass is used up before the next one begins.

    Pass e is a permutation made from (seed, e) by numpy's Philox stream, which numpy promises not to change, and a
    stable sort: the same on every machine and after every update.
    """

    def __init__(self, num_prompts: int, seed: int, digest: str = ""):
        """digest: that of the prompts' contents, by `digest_of`; a resumed run must have the same."""
        if num_prompts < 1:
            raise DataError("there are no prompts to put in order")
        self.num_prompts = num_prompts
        self.seed = seed
        self.digest = digest
        self._epoch = 0
        self._position = 0
        self._permutation = self._permute(0)

    def next(self, num: int) -> list[tuple[int, int]]:
        """Return the next `num` prompts, each as (pass over the data, position in the list of prompts)."""
        taken: list[tuple[int, int]] = []
        while len(taken) < num:
            if self._position == self.num_prompts:
                self._epoch, self._position = self._epoch + 1, 0
                self._permutation = self._permute(self._epoch)
            part = self._permutation[self._position : self._position + num - len(taken)]
            taken += [(self._epoch, index) for index in part.tolist()]
            self._position += len(part)
        return taken

    def state(self) -> dict[str, Any]:
        """Return the position in the order, for `from_state`."""
        return {
            "num_prompts": self.num_prompts,
            "seed": self.seed,
            "digest": self.digest,
            "epoch": self._epoch,
            "position": self._position,
        }

    def at(self, state: Mapping[str, Any]) -> PromptOrder:
        """Return the same order at a saved state. Raises DataError if that has other prompts or another seed."""
        return self.from_state(state, num_prompts=self.num_prompts, seed=self.seed, digest=self.digest)

    @classmethod
    def from_state(cls, state: Mapping[str, Any], *, num_prompts: int, seed: int, digest: str = "") -> PromptOrder:
        """Restore an order at a saved state, with the same prompts and seed."""
        for name, now in (("num_prompts", num_prompts), ("seed", seed)):
            if state[name] != now:
                raise DataError(
                    f"the order of prompts was saved with {name} {state[name]}, and now it is {now}: resume with the"
                    " same data and seed, or start anew"
                )
        if state.get("digest") and digest and state["digest"] != digest:
            raise DataError(
                f"the {num_prompts} prompts are not those that this run began with: their number is the same, their"
                " contents have changed; put the data back, or start anew"
            )
        order = cls(num_prompts, seed, digest)
        order._epoch, order._position = state["epoch"], state["position"]
        order._permutation = order._permute(order._epoch)
        return order

    def _permute(self, epoch: int) -> np.ndarray:
        key = hashlib.blake2b(f"{self.seed}/{epoch}".encode(), digest_size=16).digest()
        stream = np.random.Philox(key=int.from_bytes(key, "little"))
        return np.argsort(stream.random_raw(self.num_prompts), kind="stable")


def digest_of(items: Iterable[Any]) -> str:
    """Compute a digest of prompts, examples or pairs in order: of their tokens, masks and labels."""
    digest = hashlib.blake2b(digest_size=16)
    for sequence, context in chain.from_iterable(map(_parts, items)):
        token_ids = np.asarray(sequence.token_ids, dtype=np.int64)
        label = repr(context).encode()
        mask = np.asarray(getattr(sequence, "mask", ()), dtype=np.bool_)
        digest.update(f"{len(token_ids)} {len(label)} {len(mask)} ".encode())
        for part in (token_ids.tobytes(), label, mask.tobytes()):
            digest.update(part)
    return digest.hexdigest()


def _parts(item: Any) -> list[tuple[Any, Any]]:
    """Return the token sequences of an item, each with its label or margin."""
    if isinstance(item, Pair):
        return [(item.chosen, item.margin), (item.rejected, None)]
    return [(item, getattr(item, "label", None))]
