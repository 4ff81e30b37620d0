"""The order of prompts: from the seed alone, or chosen by a user's function from the scores of earlier answers."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hotseat.data.pairs import Pair
from hotseat.errors import DataError
from hotseat.words import label_text


class _Order:
    """The prompts that an order is of. digest: that of their contents, by `digest_of`; a resumed run needs the same."""

    def __init__(self, num_prompts: int, seed: int, digest: str):
        if num_prompts < 1:
            raise DataError("there are no prompts to put in order")
        self.num_prompts = num_prompts
        self.seed = seed
        self.digest = digest

    def _saved(self, **position: Any) -> dict[str, Any]:
        return {"num_prompts": self.num_prompts, "seed": self.seed, "digest": self.digest, **position}


class PromptOrder(_Order):
    """Passes over the prompts, each in another order; the rest of a pass is used up before the next one begins.

    is_shuffled: if it is false, each pass has the order of the data.

    Pass e is a permutation made from (seed, e) by numpy's Philox stream, which numpy promises not to change, and a
    stable sort: the same on every machine and after every update.
    """

    def __init__(self, num_prompts: int, seed: int, digest: str = "", *, is_shuffled: bool = True):
        super().__init__(num_prompts, seed, digest)
        self._is_shuffled = is_shuffled
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

    def left_over(self, num_passes: int) -> list[tuple[int, int]]:
        """Return the prompts of so many passes that were not taken, each as (pass, position); nothing is taken."""
        rest = self.at(self.state())
        count = num_passes * self.num_prompts - (self._epoch * self.num_prompts + self._position)
        return rest.next(max(count, 0))

    def record(self, scores: Mapping[int, float]) -> None:
        """Do nothing: the order does not depend on answers."""

    def state(self) -> dict[str, Any]:
        """Return the position in the order, for `at`."""
        return self._saved(epoch=self._epoch, position=self._position)

    def at(self, state: Mapping[str, Any]) -> PromptOrder:
        """Return the same order at a saved state. Raises DataError if that has other prompts or another seed."""
        check_saved(state, self.num_prompts, self.seed, self.digest)
        if "epoch" not in state:
            raise DataError("the order of prompts was saved with data.sampler: resume with it, or start anew")
        order = PromptOrder(self.num_prompts, self.seed, self.digest, is_shuffled=self._is_shuffled)
        order._epoch, order._position = state["epoch"], state["position"]
        order._permutation = order._permute(order._epoch)
        return order

    def _permute(self, epoch: int) -> np.ndarray:
        if not self._is_shuffled:
            return np.arange(self.num_prompts)
        return np.argsort(_stream(f"{self.seed}/{epoch}").random_raw(self.num_prompts), kind="stable")


# Takes a number of prompts to choose, the mean score of each prompt's last answers (NaN: none yet), how often each was
# chosen, both [num_prompts], and a random generator; returns that many positions in the list of prompts.
Sampler = Callable[[int, np.ndarray, np.ndarray, np.random.Generator], Sequence[int]]


class SampledOrder(_Order):
    """Prompts that a user's function chooses, from the scores of earlier answers.

    The function's generator is made from the seed and the number of calls, so that a restored order chooses the same.
    The n-th time that a prompt is chosen counts as its n-th pass.
    """

    def __init__(self, sampler: Sampler, num_prompts: int, seed: int, digest: str = ""):
        super().__init__(num_prompts, seed, digest)
        self._sampler = sampler
        self._num_calls = 0
        self._pass_rates = np.full(num_prompts, np.nan)
        self._num_draws = np.zeros(num_prompts, dtype=np.int64)

    def next(self, num: int) -> list[tuple[int, int]]:
        """Return the next `num` prompts, each as (how often it was chosen before, position in the list of prompts)."""
        generator = np.random.Generator(_stream(f"{self.seed}/sampler/{self._num_calls}"))
        chosen = checked_choice(
            self._sampler(num, self._pass_rates.copy(), self._num_draws.copy(), generator), num, self.num_prompts
        )
        self._num_calls += 1
        taken = []
        for index in chosen:
            taken.append((int(self._num_draws[index]), index))
            self._num_draws[index] += 1
        return taken

    def left_over(self, num_passes: int) -> list[tuple[int, int]]:
        """Return nothing: the function chooses, and need not choose every prompt."""
        return []

    def record(self, scores: Mapping[int, float]) -> None:
        """Take the mean score of the answers to each of these prompts."""
        for index, score in scores.items():
            self._pass_rates[index] = score

    def state(self) -> dict[str, Any]:
        """Return what was chosen and scored so far, for `at`."""
        pass_rates = [None if np.isnan(rate) else float(rate) for rate in self._pass_rates]
        return self._saved(num_calls=self._num_calls, pass_rates=pass_rates, num_draws=self._num_draws.tolist())

    def at(self, state: Mapping[str, Any]) -> SampledOrder:
        """Return the same order at a saved state. Raises DataError if that has other prompts or another seed."""
        check_saved(state, self.num_prompts, self.seed, self.digest)
        if "num_draws" not in state:
            raise DataError("the order of prompts was saved without data.sampler: resume without it, or start anew")
        order = SampledOrder(self._sampler, self.num_prompts, self.seed, self.digest)
        order._num_calls = state["num_calls"]
        order._pass_rates = np.array([np.nan if rate is None else rate for rate in state["pass_rates"]])
        order._num_draws = np.array(state["num_draws"], dtype=np.int64)
        return order


def checked_choice(chosen: Any, num: int, num_prompts: int) -> list[int]:
    """Return the positions that a user's sampler chose, as integers. Raises DataError for what cannot be positions."""
    try:
        positions = [operator.index(each) for each in chosen]
    except TypeError:
        raise DataError(f"data.sampler returned {chosen!r:.100}: it has to return {num} whole numbers") from None
    if len(positions) != num:
        raise DataError(f"data.sampler returned {len(positions)} prompts: it has to return {num}")
    outside = [each for each in positions if not 0 <= each < num_prompts]
    if outside:
        raise DataError(f"data.sampler returned {outside[0]}: positions are 0 to {num_prompts - 1}")
    return positions


def _stream(name: str) -> np.random.Philox:
    key = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(key, "little"))


def check_saved(state: Mapping[str, Any], num_prompts: int, seed: int, digest: str) -> None:
    """Raise DataError if a saved order is of other prompts or of another seed."""
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


def digest_of(items: Iterable[Any]) -> str:
    """Compute a digest of prompts, examples or pairs in order: of their tokens, masks, labels and images.

    The name of a prepared image is a digest of it; the folder around it does not count.
    """
    digest = hashlib.blake2b(digest_size=16)
    for sequence, context in chain.from_iterable(map(_parts, items)):
        token_ids = np.asarray(sequence.token_ids, dtype=np.int64)
        label = repr(context).encode()
        mask = np.asarray(getattr(sequence, "mask", ()), dtype=np.bool_)
        digest.update(f"{len(token_ids)} {len(label)} {len(mask)} ".encode())
        images = "".join(f" {Path(image).name}" for image in getattr(sequence, "images", ()))
        for part in (token_ids.tobytes(), label, mask.tobytes(), images.encode()):
            digest.update(part)
    return digest.hexdigest()


def _parts(item: Any) -> list[tuple[Any, Any]]:
    """Return the token sequences of an item, each with its label or margin."""
    if isinstance(item, Pair):
        return [(item.chosen, item.margin), (item.rejected, None)]
    others = (getattr(item, "answer", ()), getattr(item, "teacher_prompt", ()))
    tokens = [(SimpleNamespace(token_ids=each), None) for each in others if each]
    return [(item, label_text(getattr(item, "label", None))), *tokens]
