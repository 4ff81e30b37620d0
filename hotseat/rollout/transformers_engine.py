"""A rollout engine on top of transformers and torch alone: continuous batching over a fixed number of slots.

Three nouns: a *sequence* is a request on its way and knows all about it; a *slot* is a place in the batch and in the
cache, taken by one sequence at a time and given to the next as soon as it finishes; a *prefix* is the cached keys and
values of a prompt, computed once for all samples of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from hotseat import faults
from hotseat.algorithms.nf4 import quantise_layers
from hotseat.algorithms.routing import RoutingRecorder
from hotseat.errors import HotseatError, UserError
from hotseat.placement.role_names import Part
from hotseat.rollout.any_slots import check_config
from hotseat.rollout.engine import PARTS, Engine, ServingOptions
from hotseat.rollout.kinds import EngineKind, EngineProcess, EngineSettings
from hotseat.rollout.live_weights import LiveWeights
from hotseat.rollout.llama_slots import slot_model
from hotseat.rollout.open_requests import EngineSequence
from hotseat.rollout.slot_cache import NO_IMAGES, Context, ImageBatch, Prefix, PrefixCache, padded
from hotseat.rollout.slot_rows import Filters, SlotRows
from hotseat.types import Completion, Request
from hotseat.vision import placeholder_ids, policy_class


@dataclass(frozen=True)
class SlotOptions:
    """How a model runs over slots.

    dtype: of the model; None leaves it as it is. own_layers: False runs the model's own forward even where a faster
    one is known. fp32_head: logits of a 16-bit model are float32, as the trainer's are; False rounds them to the
    model's type. prefix_cache_tokens: how many prompt tokens to keep for other samples of the same prompt; by default
    8 * max_length. keeps_cache: requests in flight keep their KV cache when weights change; False recomputes
    it. tokens_at_once: how many tokens of each sequence are sampled at most before the host looks at them; by default
    16 on a CUDA device and 1 on a CPU. returns_routing: completions have the experts that tokens took.
    """

    device: str | torch.device = "cpu"
    dtype: torch.dtype | None = None
    own_layers: bool = True
    fp32_head: bool = True
    prefix_cache_tokens: int | None = None
    keeps_cache: bool = True
    tokens_at_once: int | None = None
    returns_routing: bool = False


_DEFAULT_OPTIONS = SlotOptions()


class TransformersEngine(Engine):
    """The engine on transformers.

    On a CPU completions are bit for bit independent of other requests.

    model: any causal language model of transformers with a KV cache; the engine owns it from here on
        (it may rearrange the memory of its parameters; they stay the module's).
    num_threads: of the thread that computes. Sums may depend on it, so it is a setting and not inherited; it also
        becomes the default of threads started later in the process. None leaves it to torch. More than one pays on idle
        cores only (see `bench/engine_throughput.py`); where others work too, take more engines of one thread.

    On a CPU the host is the device: offloaded weights are kept elsewhere in the same memory, and only dropping them
    (`keep_weights=False`) or the cache leaves room for others.
    """

    parts: frozenset[Part] = frozenset(PARTS)
    can_offload: frozenset[Part] = frozenset(PARTS)
    scores_with: frozenset[Part] = frozenset({Part.WEIGHTS})
    undigested: frozenset[str] = frozenset()

    def __init__(
        self,
        model: Any,
        *,
        options: SlotOptions = _DEFAULT_OPTIONS,
        **serving: Unpack[ServingOptions],
    ):
        where = torch.device(options.device)
        if where.type == "cuda" and where.index is None:
            where = torch.device("cuda", torch.cuda.current_device())
        vocab_size = int(model.get_input_embeddings().weight.shape[0])
        super().__init__(vocab_size=vocab_size, device=where, **serving)
        max_length, num_slots = self._max_length, self._num_slots
        max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if max_positions is not None and max_length > max_positions:
            raise UserError(f"max_length {max_length} is over the model's max_position_embeddings {max_positions}")
        model = model.to(device=where, dtype=options.dtype).eval()
        self._slots = slot_model(model, num_slots, max_length, where, options.own_layers, options.fp32_head)
        self.sees_images = self._slots.sees_images
        if self.sees_images:
            self.placeholder_ids = frozenset(placeholder_ids(model.config))
        self._routing = RoutingRecorder(model) if options.returns_routing else None
        self._weights = LiveWeights(model)
        kept = 8 * max_length if options.prefix_cache_tokens is None else options.prefix_cache_tokens
        per_state = self._slots.cache.tokens_per_state  # as many prefixes of full length have states
        self._prefixes = PrefixCache(kept + kept * per_state // max_length, per_state)
        self._rows = SlotRows(num_slots, max_length, self._slots.has_shifts, where)
        # The sequence in each slot, None where one has just ended; touched by the background thread alone.
        self._running: list[EngineSequence | None] = []
        self._saved_cache: tuple[Tensor, ...] | None = None
        self._is_cache_old = False  # offloaded before the weights changed, and to be recomputed
        self.keeps_cache = options.keeps_cache
        self._max_at_once = options.tokens_at_once or (16 if where.type == "cuda" else 1)
        self._start()

    def _checked(self, request: Request) -> EngineSequence:
        # The last token of a prompt is decoded like those that are sampled, without pixels.
        if request.images and request.token_ids and request.token_ids[-1] in self.placeholder_ids:
            raise UserError(
                f"request {request.id!r}: its prompt ends with an image, which this engine cannot continue: end it with"
                " text, such as a line break"
            )
        return super()._checked(request)

    # --- one step ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Append tokens to every running sequence, after free slots were given to waiting ones."""
        self._admit()
        active = [(slot, sequence) for slot, sequence in enumerate(self._running) if sequence is not None]
        if not active:
            return
        sequences = [sequence for _, sequence in active]
        filters = Filters.of(active, self._device)
        steps, routing = [], []
        for ahead in range(self._num_at_once(sequences)):
            steps.append(self._sample(sequences, ahead, filters))
            if self._routing is not None:
                routing.append(self._routing.last())
        # [tokens, 2, rows]: all tokens and log-probs come in one transfer.
        sampled = torch.stack(steps).cpu().numpy()
        self._take(active, sampled, torch.stack(routing).cpu().numpy() if routing else None)

    def _take(self, active: Sequence[tuple[int, EngineSequence]], sampled: Any, routing: Any | None) -> None:
        """Append sampled tokens, [tokens, 2, rows], to the sequences in these slots; complete those that end.

        routing: of the tokens that they were sampled after, [tokens, rows, width].
        """
        tokens, log_probs = sampled[:, 0], sampled[:, 1]
        num_tokens = len(tokens)
        counts = np.full(tokens.shape[1], num_tokens)  # of the tokens of each row, up to one that ends it
        rows_of: dict[frozenset[int], list[int]] = {}
        for slot, sequence in active:
            rows_of.setdefault(sequence.stop_ids, []).append(slot)
        for stop_ids, rows in rows_of.items():
            is_stop = np.isin(tokens[:, rows], list(stop_ids))
            counts[rows] = np.where(is_stop.any(0), is_stop.argmax(0) + 1, num_tokens)
        is_finite = np.isfinite(log_probs)
        num_finite = np.where(is_finite.all(0), num_tokens, is_finite.argmin(0)).tolist()
        by_row, scores = tokens.T.astype(np.int64).tolist(), log_probs.T.tolist()
        done: list[tuple[EngineSequence, Completion | HotseatError]] = []
        ended = []
        num_sampled = 0
        for slot, sequence in active:
            limit = min(int(counts[slot]), sequence.max_new_tokens - len(sequence.token_ids))
            if sequence.stop_strings is not None:
                limit = sequence.num_up_to_stop(by_row[slot][:limit])
            count = min(limit, num_finite[slot])
            finish = sequence.extend(by_row[slot][:count], scores[slot][:count], self._serving.version)
            num_sampled += count
            if routing is not None:
                sequence.routing.append(routing[:count, slot])
            if count < limit:
                done.append((sequence, sequence.not_finite(self._serving.version)))
                self._slots.cache.erase(slot)  # a NaN that is masked would stay NaN for the next sequence here
                ended.append(slot)
            elif finish is not None:
                done.append((sequence, sequence.completion(finish)))
                ended.append(slot)
        for slot in ended:
            self._running[slot] = None
        self._rows.clear(ended)
        self._steps.record(num_sampled)
        self._requests.complete(done)

    def _num_at_once(self, sequences: Sequence[EngineSequence]) -> int:
        """Count the tokens to sample before the host looks at them.

        What follows a token that ends its sequence is dropped: rows are computed in vain for a while, where otherwise
        the device would wait for the host after every token. Placeholders of images end sequences too, but are rare.
        """
        if self._max_at_once == 1:
            return 1
        left = [sequence.max_new_tokens - len(sequence.token_ids) for sequence in sequences]
        if all(sequence.stop_ids <= self.placeholder_ids for sequence in sequences):
            return min(self._max_at_once, min(left))
        # The host takes about as long for every sequence; with few of them, answers should not wait for long.
        return min(self._max_at_once, max(left), max(4, len(sequences) // 16))

    def _sample(self, sequences: Sequence[EngineSequence], ahead: int, filters: Filters | None) -> Tensor:
        """Decode and sample one token of every slot, `ahead` tokens after those that sequences know of.

        Returns tokens and log-probs as `SlotRows.sample` does. Nothing waits for the device.
        """
        faults.reach("generation.during")
        num_running = len(self._running)
        num_keys = max(min(s.num_keys + ahead, s.max_keys) for s in sequences)
        rows, num_keys = self._slots.step_shape(num_running, num_keys)
        state, shifts = self._rows, self._rows.shifts
        shifts = None if shifts is None else shifts[:rows]
        logits = self._slots.decode(state.tokens[:rows], state.positions[:rows], num_keys, shifts)
        return state.sample(logits, num_running, filters, any(s.is_greedy for s in sequences))

    def _admit(self) -> None:
        """Give free slots to waiting sequences; close the gaps that remain where fewer rows can be decoded then."""
        running = self._running
        gaps = [slot for slot, sequence in enumerate(running) if sequence is None]
        admitted = self._requests.take_waiting(self._num_slots - len(running) + len(gaps))
        slots = (gaps + list(range(len(running), self._num_slots)))[: len(admitted)]
        running.extend([None] * (max(slots, default=-1) + 1 - len(running)))
        for slot, sequence in zip(slots, admitted, strict=True):
            running[slot] = sequence
        if admitted:
            self._fill(slots, admitted)
        num_active = sum(sequence is not None for sequence in running)
        if self._slots.step_shape(num_active, 1)[0] < self._slots.step_shape(len(running), 1)[0]:
            sources = [slot for slot in range(num_active, len(running)) if running[slot] is not None]
            if sources:
                self._move(sources, [slot for slot in range(num_active) if running[slot] is None])
        while running and running[-1] is None:
            running.pop()

    def _fill(self, slots: list[int], sequences: list[EngineSequence]) -> None:
        """Put prompts into slots, without the last token: it is decoded with the others and gives the first logits."""
        prefixes = self._prefill(list(dict.fromkeys(_context(s) for s in sequences if len(s.prompt) > 1)))
        slots_of: dict[Context, list[int]] = {context: [] for context in prefixes}
        for slot, sequence in zip(slots, sequences, strict=True):
            if len(sequence.prompt) > 1:
                slots_of[_context(sequence)].append(slot)
        self._slots.cache.begin([slot for slot, s in zip(slots, sequences, strict=True) if len(s.prompt) == 1])
        for context, chosen in slots_of.items():
            if chosen:
                self._slots.cache.write(chosen, prefixes[context])
        for sequence in sequences if self._routing is not None else ():
            prefix = prefixes.get(_context(sequence))
            if prefix is not None and prefix.routing is not None:
                sequence.routing.append(prefix.routing)

        shifts = [self._slots.shift(s.prompt, s.request.images) for s in sequences]
        self._rows.fill(slots, sequences, shifts)

    def _prefill(self, contexts: list[Context]) -> dict[Context, Prefix]:
        prefixes_of = {context: prefix for context in contexts if (prefix := self._prefixes.get(context)) is not None}
        new = [context for context in contexts if context not in prefixes_of]
        if new:
            new += self._upcoming(new)
        for batch, tokens in self._batches(new):
            prefixes = self._slots.prefill(tokens, [len(new[i][0]) for i in batch], [new[i][1] for i in batch])
            if self._routing is not None:
                routing = self._routing.last().cpu().unflatten(0, tokens.shape).numpy()
                prefixes = [replace(each, routing=routing[row, : each.num_tokens]) for row, each in enumerate(prefixes)]
            for i, prefix in zip(batch, prefixes, strict=True):
                prefixes_of[new[i]] = prefix
                self._prefixes.put(new[i], prefix)
        return prefixes_of

    def _upcoming(self, new: list[Context]) -> list[Context]:
        """List contexts of waiting requests that fit into forwards that `new` needs anyway, and into half the cache.

        Those with images are left out.
        """
        lengths = Counter(padded(len(token_ids)) for token_ids, images in new if not images)
        rows_left = {length: -count % self._batch_size(length) for length, count in lengths.items()}
        tokens_left = self._prefixes.max_tokens // 2
        waiting = self._requests.upcoming(4 * self._num_slots)
        upcoming: list[Context] = []
        for context in dict.fromkeys(_context(s) for s in waiting if not s.request.images):
            num_tokens = self._prefixes.cost(context)
            length = padded(len(context[0]))
            fits = rows_left.get(length, 0) > 0 and num_tokens <= tokens_left
            if context[0] and fits and context not in new and context not in self._prefixes:
                upcoming.append(context)
                rows_left[length] -= 1
                tokens_left -= num_tokens
        return upcoming

    def _batch_size(self, length: int) -> int:
        return max(1, self._slots.max_forward_tokens // length)

    def _batches(self, contexts: Sequence[tuple[Sequence[int], Sequence[str]]]) -> Iterable[tuple[list[int], Tensor]]:
        """Batch contexts that are equally long once padded: yield their indices and tokens [batch, padded length].

        Padding to the length of others would change the attention kernel's blocks, and with them last bits.
        """
        by_length: dict[tuple[int, ImageBatch], list[int]] = {}
        for index, (token_ids, images) in enumerate(contexts):
            length = padded(len(token_ids))
            kind = self._slots.image_batch(length, images, index) if images else NO_IMAGES
            by_length.setdefault((length, kind), []).append(index)
        for (length, kind), indices in sorted(by_length.items()):
            size = self._batch_size(length) if kind is NO_IMAGES else kind[0]
            for start in range(0, len(indices), size):
                batch = indices[start : start + size]
                rows = [[*contexts[i][0], *[0] * (length - len(contexts[i][0]))] for i in batch]
                yield batch, torch.tensor(rows, dtype=torch.int64, device=self._device)

    def _move(self, sources: list[int], targets: list[int]) -> None:
        running = self._running
        num_keys = max(sequence.num_keys for slot in sources if (sequence := running[slot]) is not None)
        at, to = self._rows.column(sources), self._rows.column(targets)
        self._slots.cache.move(at, to, num_keys)
        self._rows.move(at, to)
        for source, target in zip(sources, targets, strict=True):
            running[target], running[source] = running[source], None
        self._rows.clear(sources)

    # --- what is asked between steps --------------------------------------------------------------------------------

    def _score(
        self, sequences: Sequence[Sequence[int]], temperature: float, images: Sequence[Sequence[str]]
    ) -> list[list[float]]:
        scores: list[list[float]] = [[] for _ in sequences]
        for batch, tokens in self._batches(list(zip(sequences, images, strict=True))):
            lengths = [len(sequences[i]) for i in batch]
            hidden = self._slots.hidden(tokens, lengths, [images[i] for i in batch]).flatten(0, 1)
            targets = tokens.roll(-1, 1).flatten()
            chunk = padded(self._slots.max_forward_tokens // 8)
            parts = []
            for start in range(0, targets.shape[0], chunk):
                rows = slice(start, start + chunk)
                log_probs = torch.log_softmax(self._slots.logits(hidden[rows]) / temperature, dim=-1)
                parts.append(log_probs.gather(1, targets[rows, None])[:, 0])
            table = torch.cat(parts).view(tokens.shape).tolist()
            for i, row in zip(batch, table, strict=True):
                scores[i] = [0.0, *row[: len(sequences[i]) - 1]]
        return scores

    def _drop(self, sequences: list[EngineSequence]) -> None:
        dropped = {id(sequence) for sequence in sequences}
        slots = [slot for slot, s in enumerate(self._running) if s is not None and id(s) in dropped]
        for slot in slots:
            self._running[slot] = None
        self._rows.clear(slots)

    def _offload_parts(self, parts: frozenset[Part], keep_weights: bool) -> tuple[int, int]:
        resident = self._resident_bytes()
        num_copied = 0
        saved = None
        lengths = [s.num_keys for s in self._running if s is not None]
        if Part.KV_CACHE in parts and lengths:
            saved = self._slots.cache.read(len(self._running), max(lengths), torch.device("cpu"))
            num_copied += sum(part.nbytes for part in saved)
        if parts:
            self._slots.release()
        if Part.WEIGHTS in parts:
            num_copied += self._weights.offload(keep_weights)
            if not keep_weights:
                self._weights.names.lose()
        if Part.KV_CACHE in parts:
            self._saved_cache = saved
            self._prefixes.clear()
            self._slots.cache.free()
        return sum(resident[part] for part in parts), num_copied

    def _resident_bytes(self) -> dict[Part, int]:
        kv_cache = self._slots.cache.num_bytes + self._prefixes.num_bytes
        return {Part.WEIGHTS: self._weights.num_bytes, Part.KV_CACHE: kv_cache}

    def _onload_parts(self, parts: frozenset[Part]) -> tuple[int, int]:
        num_bytes = num_copied = 0
        if Part.WEIGHTS in parts:
            num_copied += self._weights.onload()
            num_bytes += self._weights.num_bytes
        if Part.KV_CACHE in parts:
            self._slots.cache.allocate()
            num_bytes += self._slots.cache.num_bytes
            if self._saved_cache is not None:
                self._slots.cache.put(*self._saved_cache)
                num_copied += sum(part.nbytes for part in self._saved_cache)
                self._saved_cache = None
            if self._is_cache_old:
                self._recompute()
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()  # what came is checked against what is returned here
        return num_bytes, num_copied

    def _prepare_load(self) -> None:
        self._prefixes.clear()
        self._weights.names.begin()

    def _load(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._weights.load(named_tensors)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _finish_loading(self) -> None:
        if self.keeps_cache:
            return
        if Part.KV_CACHE in self._serving.offloaded:
            self._saved_cache, self._is_cache_old = None, True
        else:
            self._recompute()

    @torch.inference_mode()
    def _recompute(self) -> None:
        """Compute the KV cache of running sequences anew, with the weights that are loaded now."""
        self._is_cache_old = False
        # The newest token of a sequence is decoded in the next step; its keys come then.
        filled = {
            slot: ((*sequence.prompt, *sequence.token_ids)[:-1], sequence.request.images)
            for slot, sequence in enumerate(self._running)
            if sequence is not None and sequence.num_keys > 1
        }
        prefixes = self._prefill(list(dict.fromkeys(filled.values())))
        for slot, context in filled.items():
            self._slots.cache.write([slot], prefixes[context])

    def _missing(self) -> list[str]:
        missing = self._weights.names.missing()
        if not missing:
            self._weights.names.keep()
        return missing

    def _digest(self, names: Collection[str] | None) -> dict[str, int]:
        return self._weights.digest(names)


def _context(sequence: EngineSequence) -> Context:
    """Return the part of a sequence to prefill: its prompt without the last token, and its images."""
    return sequence.prompt[:-1], sequence.request.images


class TransformersKind(EngineKind):
    """The engine on transformers."""

    def check_model(self, config: Any, max_length: int, tensor_parallel_size: int, is_cpu: bool) -> None:
        check_config(config, max_length)

    def make(self, settings: EngineSettings, process: EngineProcess) -> Engine:
        source, dtype = settings.model, getattr(torch, settings.dtype)
        model = policy_class(source.config()).from_pretrained(
            source.name, dtype=dtype, use_safetensors=True, **source.arguments, **source.own_config
        )
        if settings.options.has_nf4:
            quantise_layers(model, process.device)
            for name in process.adapted_layers:
                model.get_submodule(name).add_factors(settings.options.adapter_rank)
        return TransformersEngine(
            model,
            max_length=settings.max_length,
            num_slots=settings.num_slots,
            eos_token_ids=settings.eos_token_ids,
            num_threads=settings.num_threads,
            options=SlotOptions(
                device=process.device,
                fp32_head=settings.fp32_head,
                prefix_cache_tokens=settings.num_kept_prompts * settings.max_length,
                keeps_cache=settings.keeps_cache,
                returns_routing=settings.returns_routing,
            ),
        )
