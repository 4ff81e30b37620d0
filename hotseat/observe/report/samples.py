"""Recorded samples: a selection over all steps and states, packed so that many fit into a page."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, repeat, takewhile, zip_longest
from pathlib import Path
from typing import Any

from hotseat.observe.report.reading import encoded, finite, json_lines_at, parsed, shortened
from hotseat.words import label_text

MAX_TOKENS = 1_600  # of one sample: the first three quarters and the last quarter
MAX_PROMPT_CHARACTERS = 6_000
MAX_TURNS = 400
MAX_IMAGES = 4  # of one sample
MAX_IMAGE_BYTES = 40_000
MAX_FILM_CHARACTERS = 400_000
_FILM = "data:image/webp;base64,"
LOG_PROB_UNIT = 1e-4
GAP_UNIT = 1e-5


def read_samples(run_dir: Path, budget: int) -> dict[str, Any] | None:
    """Read as many samples as fit into `budget` bytes. None if the run recorded none."""
    path = run_dir / "samples.jsonl"
    places = [(offset, record.get("step"), record.get("state")) for offset, record in json_lines_at(path)]
    if not places:
        return None
    chosen: list[tuple[int, dict[str, Any]]] = []
    spent = 0
    with path.open("rb") as file:
        for index in covering_order(places):
            file.seek(places[index][0])
            packed = pack(parsed(file.readline()))
            size = len(encoded(packed)) + 1
            # A sample that is too big does not end the search: there may be room for smaller ones.
            if spent + size <= budget:
                chosen.append((index, packed))
                spent += size
            if spent > 0.98 * budget:
                break
    chosen.sort(key=lambda pair: pair[0])
    return {"shown": [packed for _, packed in chosen], "num_recorded": len(places)}


def covering_order(places: Sequence[tuple[int, Any, Any]]) -> Iterator[int]:
    """Order all samples so that the first ones always cover the run: one per step and state, then the next.

    Steps come in the order last, first, middle, quarters and so on.
    """
    by_step: dict[Any, dict[Any, list[int]]] = {}
    for index, (_, step, state) in enumerate(places):
        by_step.setdefault(step, {}).setdefault(state, []).append(index)
    steps = sorted(by_step, key=lambda step: (0, step, "") if isinstance(step, int) else (1, 0, str(step)))
    ordered = [members for position in halving_order(len(steps)) for members in by_step[steps[position]].values()]
    for turn in zip_longest(*ordered):
        yield from (index for index in turn if index is not None)


def halving_order(count: int) -> list[int]:
    """Order 0 to count - 1: the last, the first, then repeatedly the middles between those already taken."""
    if count == 0:
        return []
    order = [count - 1, 0] if count > 1 else [0]
    gaps = [(0, count - 1)]
    while gaps:
        next_gaps = []
        for low, high in gaps:
            middle = (low + high) // 2
            if low < middle < high:
                order.append(middle)
                next_gaps += [(low, middle), (middle, high)]
        gaps = next_gaps
    return order


def pack(record: dict[str, Any]) -> dict[str, Any]:
    """Pack a sample for the page. Lists that repeat a value become `[value, count]` pairs."""
    segments = [segment for segment in record.get("segments") or [] if isinstance(segment, dict)]
    num_tokens = sum(len(segment.get("text") or []) for segment in segments)
    film = str(record.get("film") or "")
    turns = [turn for turn in record.get("turns") or [] if isinstance(turn, dict)]
    return {
        "step": record.get("step"),
        "key": [record.get("epoch"), record.get("prompt"), record.get("sample")],
        "source": str(record.get("source") or ""),
        "state": str(record.get("state") or ""),
        "reason": shortened(record.get("reason") or ""),
        "reward": finite(record.get("reward")),
        "score": finite(record.get("score")),
        "is_truncated": bool(record.get("is_truncated")),
        "label": None if (label := label_text(record.get("label"))) is None else shortened(label),
        "prompt_text": shortened(record.get("prompt_text") or "", MAX_PROMPT_CHARACTERS),
        "extra": record.get("extra") if isinstance(record.get("extra"), dict) else {},
        "images": _pack_images(record.get("images")),
        # The frames of an episode, if they are an animated image that is not too large.
        "film": film if film.startswith(_FILM) and len(film) <= MAX_FILM_CHARACTERS else None,
        "num_tokens": num_tokens,
        "turns": [
            {
                "length": turn.get("length"),
                "reward": finite(turn.get("reward")),
                "asked_s": finite(turn.get("asked_s")),
                "answered_s": finite(turn.get("answered_s")),
                "tool_calls": [shortened(call) for call in turn.get("tool_calls") or []],
            }
            for turn in turns[:MAX_TURNS]
        ],
        "waited_s": finite(record.get("waited_s")),
        "took_s": finite(record.get("took_s")),
        "segments": list(_pack_segments(_with_turns(segments, turns), num_tokens)),
    }


def _with_turns(segments: Sequence[dict[str, Any]], turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return segments with the turn of each sampled token, and what they share with an earlier one: a branch."""
    lengths = [turn.get("length") for turn in turns]
    of_tokens = iter([at for at, length in enumerate(lengths) if isinstance(length, int) for _ in range(length)])
    made: list[dict[str, Any]] = []
    for index, segment in enumerate(segments):
        sampled = segment.get("sampled") or []
        numbers = [next(of_tokens, None) if is_sampled else None for is_sampled in sampled]
        shared = [(_num_shared(segments[other], segment), other) for other in range(index)]
        most = max(shared, key=lambda pair: pair[0], default=(0, 0))
        made.append(segment | {"turns": numbers, "segment": index, "shared": list(most)})
    return made


def _num_shared(segment: dict[str, Any], later: dict[str, Any]) -> int:
    """Count the tokens with which a later segment repeats another: none that it sampled itself, even if alike."""
    tokens = later.get("text") or []
    is_sampled = chain(later.get("sampled") or [], repeat(False))
    alike = zip(segment.get("text") or [], tokens, is_sampled, strict=False)
    return sum(1 for _ in takewhile(lambda each: each[0] == each[1] and not each[2], alike))


def _pack_images(images: Any) -> list[str]:
    """Return small copies of prepared images, which lie beside them, as data URIs; of those that are there."""
    packed = []
    for image in images[:MAX_IMAGES] if isinstance(images, list) else ():
        try:
            small = Path(str(image)).with_suffix(".png").read_bytes()
        except OSError:
            continue
        if len(small) <= MAX_IMAGE_BYTES:
            packed.append(f"data:image/png;base64,{base64.b64encode(small).decode()}")
    return packed


def _pack_segments(segments: Sequence[dict[str, Any]], num_tokens: int) -> Iterator[dict[str, Any]]:
    """Yield each segment's tokens, without the middle of a sample that is too long."""
    gap_from, gap_to = num_tokens, num_tokens
    if num_tokens > MAX_TOKENS:
        gap_from, gap_to = MAX_TOKENS * 3 // 4, num_tokens - MAX_TOKENS // 4
    first = 0
    for segment in segments:
        length = len(segment.get("text") or [])
        for low, high in ((0, gap_from), (gap_to, num_tokens)):
            begin, end = max(low - first, 0), min(high - first, length)
            if begin < end:
                num_shared, of = segment["shared"]
                yield _pack_tokens(segment, begin, end) | {
                    "first": first + begin,
                    "segment": segment["segment"],
                    "shared": [max(0, num_shared - begin), of],
                }
        first += length


def _pack_tokens(segment: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    def part(name: str) -> list[Any]:
        values = segment.get(name)
        values = values if isinstance(values, list) else []
        return [values[index] if index < len(values) else None for index in range(begin, end)]

    engine = [finite(value) for value in part("engine_log_probs")]
    trainer = [finite(value) for value in part("trainer_log_probs")]
    gaps = [
        None if ours is None or theirs is None else ours - theirs for ours, theirs in zip(trainer, engine, strict=True)
    ]
    return {
        "text": [str(text) for text in part("text")],
        "sampled": in_runs([bool(value) for value in part("sampled")]),
        "engine": [None if value is None else round(value / LOG_PROB_UNIT) for value in engine],
        "gap": [None if value is None else round(value / GAP_UNIT) for value in gaps],
        "advantage": in_runs([None if value is None else round(value, 4) for value in map(finite, part("advantages"))]),
        "fate": in_runs(part("fates")),
        "version": in_runs(part("versions")),
        "turn": in_runs(part("turns")),
    }


def in_runs(values: Sequence[Any]) -> list[list[Any]]:
    return [[value, len(list(members))] for value, members in groupby(values)]
