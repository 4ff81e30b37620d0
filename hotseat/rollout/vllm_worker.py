"""The part of the engine inside vLLM's workers: mixed into vLLM's own worker class, one per tensor-parallel rank.

Methods are called through vLLM's `collective_rpc`, in the engine's process or in others. A mistake in the weights comes
back as a message instead of an error: from another process vLLM would hand on neither its type nor its text.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hotseat.algorithms.digest import named_digests
from hotseat.determinism import keep_float32
from hotseat.errors import WeightError
from hotseat.rollout import vllm_internals as inside
from hotseat.rollout import vllm_nf4 as vllm_nf4
from hotseat.rollout.fused_weights import Piece, adapter_pieces, pieces, renamed
from hotseat.rollout.live_weights import WeightNames
from hotseat.rollout.vllm_delta_rule import compute_in_torch, register_text_class
from hotseat.rollout.vllm_fp8 import QuantisedDigests, QuantisedPiece, fp8_problem, quantising
from hotseat.rollout.vllm_images import use_prepared_images
from hotseat.rollout.vllm_latent import DecodingWeights, latent_problem, rotate_views

# Called here, and NF4 is imported: this module is the first of ours that a worker's process imports, before it loads
# the model.
inside.leave_weights_in_place()
inside.leave_classes_alone()
use_prepared_images()
register_text_class()
compute_in_torch()
keep_float32()


class WorkerExtension:
    """Methods added to vLLM's workers. Their names begin with `hotseat_`, so that none replaces one of vLLM's."""

    model_runner: Any  # vLLM's
    rank: int  # vLLM's

    def hotseat_start(self, names: WeightNames) -> dict[str, Any]:
        """Find the weights; return the bytes of each part on this rank's device, and names that no digest reaches."""
        if multiprocessing.parent_process() is not None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends this process
        model, model_config = self.model_runner.model, self.model_runner.model_config
        problem = (
            inside.experts_problem(model)
            or inside.widen_head(model, model_config)
            or fp8_problem(model, model_config)
            or latent_problem(model)
        )
        if problem is not None:
            return {"problem": problem}
        rotate_views(model)
        self.hotseat_names = names
        weights = quantising(renamed(pieces(model, self.rank), model, names.first_names), model)
        every = [*weights, *adapter_pieces(model, self.rank, names)]
        self.hotseat_pieces: list[Piece] = [piece for piece in every if names.shapes.get(piece.name) == piece.shape]
        self.hotseat_decoding = DecodingWeights(model, self.hotseat_pieces)
        self.hotseat_quantised = QuantisedDigests()
        is_quantised = any(isinstance(piece, QuantisedPiece) for piece in self.hotseat_pieces)
        if names.factors or is_quantised:
            instead = "unset rollout.quantization" if is_quantised else "set rollout.lora_sync to merged"
            problem = self._hotseat_take_all(names, instead)
            if problem is not None:
                return {"problem": problem}
        if names.factors:
            inside.add_adapter(self.model_runner)  # of zeros: pushes write to its memory
        self.hotseat_taken: dict[str, list[Piece]] = {}
        self.hotseat_dtypes: dict[str, torch.dtype] = {}  # of weights as they arrived
        for piece in self.hotseat_pieces:
            if piece.is_taken_here:
                self.hotseat_taken.setdefault(piece.name, []).append(piece)
        self.hotseat_buffers: dict[str, Tensor] = {}
        self.hotseat_is_dropped = False  # memory of the weights was given up without a copy
        if not hasattr(self, "hotseat_scoring"):
            self.hotseat_scoring = inside.PromptScoring()
            inside.let_prompts_be_scored_by(self.model_runner, lambda: self.hotseat_scoring)
        reached = {piece.name for piece in self.hotseat_pieces}
        return {
            "bytes": inside.part_bytes(self),
            "undigested": [name for name, first in names.first_names.items() if not reached & {name, first}],
        }

    def _hotseat_take_all(self, names: WeightNames, instead: str) -> str | None:
        """Have every weight copied into its pieces; return why that cannot be, or None.

        vLLM's own loaders find no weights below its adapters, and would not quantise them once more.
        """
        reached = {piece.name for piece in self.hotseat_pieces}
        lost = next((name for name, first in names.first_names.items() if not reached & {name, first}), None)
        if lost is not None:
            return f"vLLM's {type(self.model_runner.model).__name__} has no known place for {lost}: {instead}"
        self.hotseat_pieces = [replace(piece, is_taken_here=True) for piece in self.hotseat_pieces]
        return None

    def hotseat_score_by(self, temperature: float, vocab_size: int | None = None) -> None:
        self.hotseat_scoring = inside.PromptScoring(temperature, vocab_size)

    # --- weights ------------------------------------------------------------------------------------------------------

    def hotseat_begin_load(self) -> None:
        self.hotseat_names.begin()
        self.hotseat_arrived: set[str] = set()

    def hotseat_load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> str | None:
        """Replace these weights; return what is wrong with them, or None."""
        made: list[tuple[QuantisedPiece, Tensor]] = []

        def checked() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in named_tensors:
                self.hotseat_names.take(name, tensor.shape)
                first = self.hotseat_names.first_names[name]
                if first in self.hotseat_arrived:  # vLLM wants a tied weight once
                    continue
                self.hotseat_arrived.add(first)
                self.hotseat_dtypes[first] = tensor.dtype
                for piece in self.hotseat_taken.get(first, ()):
                    piece.take(tensor)
                    if isinstance(piece, QuantisedPiece):
                        made.append((piece, tensor))
                if first not in self.hotseat_taken:
                    yield first, tensor

        try:
            with torch.inference_mode():
                self.model_runner.model.load_weights(checked())
                self.hotseat_quantised.record(made)
        except WeightError as error:
            return str(error)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the sender may reuse its memory when this returns
        return None

    def hotseat_missing(self) -> list[str]:
        """List the weights that this load lacks; if there are none, it is complete."""
        missing = self.hotseat_names.missing()
        if not missing:
            self.hotseat_names.keep()
            with torch.inference_mode():
                self.hotseat_decoding.make(self.model_runner.model_config.dtype)
        return missing

    def hotseat_digest(self, names: Collection[str] | None) -> list[tuple[str, tuple[int, ...], int, bool]] | str:
        """Return (name, offset, digest, whether it counts) of this rank's piece of each of these weights, or of all.

        A message instead says why there is no digest.
        """
        chosen = [piece for piece in self.hotseat_pieces if names is None or piece.name in names]
        quantised = [piece for piece in chosen if isinstance(piece, QuantisedPiece)]
        plain = [piece for piece in chosen if not isinstance(piece, QuantisedPiece)]
        with torch.inference_mode():
            digests = named_digests(
                [(str(index), piece.as_sent(self.hotseat_dtypes.get(piece.name))) for index, piece in enumerate(plain)],
                {str(index): piece.offset for index, piece in enumerate(plain)},
            )
            try:
                of_quantised = self.hotseat_quantised.of(quantised)
                self.hotseat_decoding.check({plain[int(index)].name: digest for index, digest in digests.items()})
            except WeightError as error:
                return str(error)
        every = zip([*plain, *quantised], [*digests.values(), *of_quantised], strict=True)
        return [(piece.name, piece.offset, digest, piece.is_counted) for piece, digest in every]

    # --- parts --------------------------------------------------------------------------------------------------------

    def hotseat_offload(self, parts: list[str], keep_weights: bool) -> tuple[int, int]:
        """Take parts off the device: (bytes that left, bytes that were copied)."""
        torch.cuda.synchronize()
        if "weights" in parts and not keep_weights:
            self.hotseat_names.lose()
            self.hotseat_quantised.forget()
            self.hotseat_is_dropped = True
            # Buffers lie beside the weights, and no push brings them.
            self.hotseat_buffers = {name: buffer.cpu() for name, buffer in self.model_runner.model.named_buffers()}
        return inside.offload(parts, keep_weights)

    def hotseat_onload(self, parts: list[str]) -> tuple[int, int]:
        moved = inside.onload(self.model_runner, parts)
        if "weights" in parts and self.hotseat_buffers:
            for name, buffer in self.model_runner.model.named_buffers():
                buffer.copy_(self.hotseat_buffers[name])
            self.hotseat_buffers = {}
        if "weights" in parts and self.hotseat_is_dropped:
            self.hotseat_is_dropped = False
            inside.clear_adapter(self.model_runner)
        torch.cuda.synchronize()
        return moved
