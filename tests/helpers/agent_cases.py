"""A small tokenizer, scripted engines and agent files for the tests of `hotseat.agents`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hotseat.agents import Agent, AgentHost
from hotseat.types import Completion, Episode, Failed, Prompt, Request, SampleKey, Sampling, ScoredEpisode

WAIT_S = 300.0
SAMPLING = Sampling(max_new_tokens=50, temperature=0.7)
KEY = SampleKey(0, 3, 1)


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and <eos>."""
    chars = [chr(code) for code in range(32, 127)] + ["\n"]
    backend = Tokenizer(models.WordLevel({char: at for at, char in enumerate(chars)}, "?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken("<eos>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


TOKENIZER = _tokenizer()


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def prompt_of(text: str, label: Any = "") -> Prompt:
    return Prompt(KEY.prompt, text, ids_of(text), label)


def completion_of(request: Request, text: str, finish: str = "stop") -> Completion:
    """Log-probs count down from -1/2, so that none looks like another; the version is the turn."""
    ids = ids_of(text)
    turn = int(request.id.split("/")[3].split("#")[0])
    return Completion(request.id, ids, tuple(-0.5 - at / 4 for at in range(len(ids))), (turn,) * len(ids), finish)


class Script:
    """An engine that says what it is told to, and remembers what it was asked."""

    def __init__(self, answers: Sequence[str] | Callable[[Request], str]):
        self.requests: list[Request] = []
        self._answers = answers

    def __call__(self, request: Request) -> Future[Completion]:
        self.requests.append(request)
        answers = self._answers
        text = answers(request) if callable(answers) else answers[len(self.requests) - 1]
        future: Future[Completion] = Future()
        text, _, cut = text.partition("|")  # "text|cut" was cut at the limit
        future.set_result(completion_of(request, text, "length" if cut else "stop"))
        return future

    @property
    def contexts(self) -> list[str]:
        return [TOKENIZER.decode(request.token_ids) for request in self.requests]


def play(agent: Agent, script: Script, text: str = "q:", label: Any = "") -> Episode | ScoredEpisode | Failed:
    """One episode, as a host runs it."""
    with AgentHost(agent, script, run_seed=5, timeout_s=WAIT_S) as host:
        return host.submit(prompt_of(text, label), KEY, SAMPLING).result(WAIT_S)


def marked(episode: Episode) -> list[str]:
    """Its segments as text, what was sampled in brackets. Checks that what was not sampled looks like it."""
    shown = []
    for segment in episode.segments:
        text, is_inside = "", False
        for token, mask, log_prob, version in zip(
            segment.token_ids.tolist(),
            segment.mask.tolist(),
            segment.log_probs.tolist(),
            segment.versions.tolist(),
            strict=True,
        ):
            assert mask == (version >= 0) == (log_prob < 0)
            if mask != is_inside:
                text, is_inside = text + ("[" if mask else "]"), mask
            text += TOKENIZER.decode([token])
        shown.append(text + ("]" if is_inside else ""))
    return shown


class Clock:
    """The time of an event loop, which stands still until `pass_by`: no limit is over before."""

    def __init__(self, loop):
        self._loop, self._now_s = loop, loop.time()
        loop.time = lambda: self._now_s

    def pass_by(self, seconds):
        self._loop.call_soon_threadsafe(self._advance, seconds)

    def _advance(self, seconds):
        self._now_s += seconds
