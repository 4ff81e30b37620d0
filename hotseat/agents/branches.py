"""Segments of an episode, made of its answers, where a program outside decides what each answer follows.

An answer is recorded with the token ids that the engine was asked to continue. An answer whose context begins with the
context and the tokens of an earlier one continues it, token by token; the longest such answer is its parent. So the
answers of an episode form a forest:

    context  answer 1  added  answer 2          a plain conversation: one path
    context  answer 1  added  answer 3          the program went back and asked something else: a branch
    another context    answer 4                 a subagent, or a history that was made shorter: a second root

Each answer that nothing continues ends a path, and each path is a segment of the episode: from the first token of its
root to its last sampled token. Where paths share an answer, the first of them learns it; in the others it is context.
Every sampled token is thus learned exactly once, after exactly the tokens that the engine sampled it after. Segments of
an episode share its reward and its sample id, so an episode counts once however often its program branches.

An image is known by its file, and in the tokens by placeholders that say nothing about what is in it: an answer
continues another one only if the images are the same, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hotseat.agents.transcript import GrowingSegment
from hotseat.types import Completion, Segment


@dataclass(frozen=True, eq=False)
class Answer:
    """Tokens that the engine sampled, and those that it sampled them after."""

    context: tuple[int, ...]
    completion: Completion
    is_learned: bool = True  # False: sampled under other settings than the run's, so it is only context
    tool_calls: tuple[str, ...] = ()  # `name(arguments)` each, for people
    images: tuple[str, ...] = ()  # files of those in the context, in order
    is_end: bool = False  # no answer continues it

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.context + self.completion.token_ids


def in_order(answers: Sequence[Answer]) -> list[Answer]:
    """Return answers in an order that does not depend on which of several requests at a time was answered first.

    The last one stays the last: with it the episode ended. An answer comes after those that it continues, because its
    context is longer.
    """
    *others, last = answers
    return [*sorted(others, key=lambda answer: (len(answer.context), answer.token_ids, answer.images)), last]


def segments_of(answers: Sequence[Answer]) -> tuple[tuple[Segment, ...], list[Answer]]:
    """Return the segments of an episode, and the answers that are learned, in the order in which segments have them.

    answers: each after those that it continues. A segment is in the place of the answer that it ends with, so the
    last one contains the last answer, unless that is not learned. Paths on which nothing is left to learn are left out.
    """
    paths = _paths(answers)
    segments = tuple(_segment(answers, path, set(new)) for path, new in paths)
    return segments, [answers[at] for _, new in paths for at in new]


def _paths(answers: Sequence[Answer]) -> list[tuple[list[int], list[int]]]:
    """Return the path of each segment: its answers from root to end, and those of them that are learned in it."""
    parents = _parents(answers)
    is_inner = {parent for parent in parents if parent is not None}
    paths: list[tuple[list[int], list[int]]] = []
    learned: set[int] = set()
    for end in range(len(answers)):
        if end in is_inner:
            continue
        path, before = [end], parents[end]
        while before is not None:
            path.insert(0, before)
            before = parents[before]
        new = [at for at in path if answers[at].is_learned and at not in learned]
        if new:
            learned.update(new)
            paths.append((path, new))
    return paths


def _segment(answers: Sequence[Answer], path: Sequence[int], new: set[int]) -> Segment:
    draft = GrowingSegment([])
    for at in path:
        answer = answers[at]
        for image in answer.images[len(draft.images) :]:
            draft.add_image(image, 0)  # somewhere in what comes next
        draft.add(answer.context[len(draft.token_ids) :])
        if at in new:
            draft.add_sampled(answer.completion)
        else:
            draft.add(answer.completion.token_ids)
    return draft.segment()


def _parents(answers: Sequence[Answer]) -> list[int | None]:
    """Return, for each answer, the one among the earlier ones that it continues; of several, the longest and latest."""
    # Tokens and images up to the end of an answer -> the latest such answer.
    ends: dict[tuple[tuple[int, ...], tuple[str, ...]], int] = {}
    sizes: list[tuple[int, int]] = []  # numbers of those tokens and images, in descending order
    parents: list[int | None] = []
    for at, answer in enumerate(answers):
        candidates = (
            ends.get((answer.context[:num_tokens], answer.images[:num_images]))
            for num_tokens, num_images in sizes
            if num_tokens <= len(answer.context)
        )
        parents.append(next((parent for parent in candidates if parent is not None), None))
        if answer.is_end:
            continue
        tokens = answer.token_ids
        ends[tokens, answer.images] = at
        size = len(tokens), len(answer.images)
        if size not in sizes:
            sizes.append(size)
            sizes.sort(reverse=True)
    return parents
