"""Stop strings: which sampled token completes one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hotseat.agents.transcript import decode, decode_after

_MORE = 8  # tokens before a string, where a character may begin whose other bytes are not in the tokens looked at
_NO_TEXT = "\ufffd"  # what tokenizers write for bytes that are no character yet


class StopStrings:
    """Finds the token that completes one of some strings in the text that was sampled, special tokens included.

    The text of the prompt does not count. A token that completes a string may have more text after it.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]):
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._num_tokens = max(len(each.encode()) for each in strings) + _MORE  # a token has a byte or more
        self._ends = {each[-1] for each in strings}
        self._known: dict[int, bool] = {}  # by token

    def completed(self, prompt: Sequence[int], sampled: Sequence[int]) -> str | None:
        """Return the string that is in the text of the last sampled tokens; None if none of them is."""
        if not sampled or not self.may_complete(sampled[-1]):
            return None
        start = max(0, len(sampled) - self._num_tokens)
        before = sampled[start - _MORE : start] if start > _MORE else [*prompt[-_MORE:], *sampled[:start]]
        text = decode_after(self._tokenizer, before, sampled[start:])
        ends = [(text.find(each) + len(each), each) for each in self._strings if each in text]
        return min(ends)[1] if ends else None

    def may_complete(self, token: int) -> bool:
        """Tell whether a token may be the last one of a string, by its text alone: most are none, and cost nothing."""
        known = self._known.get(token)
        if known is None:
            text = decode(self._tokenizer, [token])
            is_unclear = not text or _NO_TEXT in text or " " in self._ends  # some tokens lose their spaces alone
            known = self._known[token] = is_unclear or not self._ends.isdisjoint(text)
        return known
