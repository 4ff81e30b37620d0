"""`hotseat chat`: a conversation with a model in a terminal, turn by turn."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from hotseat.agents.transcript import decode
from hotseat.checks.model_configs import eos_token_ids
from hotseat.config import Config
from hotseat.config.chat_template import chat_template_text
from hotseat.config.resolved import max_new_tokens
from hotseat.data import ChatTemplate
from hotseat.loop.inputs import load_tokenizer
from hotseat.loop.offline.answering import on_this_device
from hotseat.loop.settings.rollout_settings import engine_settings, rollout_sampling
from hotseat.loop.workers.engine_worker import make_engine
from hotseat.observe import LiveView
from hotseat.types import Request

NEW, EXIT = "/new", "/exit"
TIMEOUT_S = 3600.0


class Chat:
    """Conversation with an engine in this process. On a CPU the same words and the same seed get the same answers."""

    def __init__(self, config: Config, logs: Path, view: LiveView, system: str | None = None):
        config = on_this_device(config)
        view.stage("reading the tokenizer")
        self._tokenizer = load_tokenizer(config)
        self._template = ChatTemplate(
            self._tokenizer, chat_template_text(config.data.chat_template), config.data.chat_template_kwargs
        )
        self._eos = eos_token_ids(config, self._tokenizer)
        self._config = config
        self._system = system
        self._messages: list[dict[str, str]] = []
        self.forget()
        view.stage(f"loading {config.actor.model} into {config.rollout.engine}")
        self._engine = make_engine(engine_settings(config, self._eos, logs), 0, view.stage)

    def forget(self) -> None:
        """Begin another conversation."""
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def answer(self, words: str) -> str:
        """Return the model's answer, and add both to the conversation; if there is no room for them, say so."""
        asked = [*self._messages, {"role": "user", "content": words}]
        text = self._template.render(asked, "messages", for_generation=True)
        token_ids = tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        room = self._config.data.max_length - len(token_ids)
        if room < 1:
            return (
                f"(the conversation has {len(token_ids):,} tokens, more than data.max_length allows: {NEW} begins anew)"
            )
        sampling = replace(rollout_sampling(self._config), max_new_tokens=min(room, max_new_tokens(self._config)))
        digest = hashlib.blake2b(f"{self._config.seed}/{text}".encode(), digest_size=7).digest()
        request = Request(f"turn-{len(asked)}", token_ids, sampling, int.from_bytes(digest, "big"))
        [completion] = self._engine.generate([request], timeout_s=TIMEOUT_S)
        ids = [token for token in completion.token_ids if token not in self._eos]
        answer = decode(self._tokenizer, ids)
        self._messages = [*asked, {"role": "assistant", "content": answer}]
        return answer if completion.finish == "stop" else f"{answer} ..."

    def close(self) -> None:
        self._engine.close()


def converse(chat: Chat, lines: Iterable[str], show: Callable[[str], object]) -> None:
    """Answer each line until they end or one is `/exit`; `/new` begins another conversation."""
    for line in lines:
        words = line.strip()
        if words == EXIT:
            return
        if words == NEW:
            chat.forget()
            show("(a new conversation)")
        elif words:
            show(chat.answer(words))
