"""A model as judge: asks for verdicts on answers, by a rubric, at an OpenAI-compatible endpoint or on an engine.

Each answer is put into the rubric and sent as one chat message, once for each vote. The verdict is read from the last
match of a pattern in what the judge writes, and lies within the scale; anything else is no verdict. Verdicts are kept
by the content of their request in a file: an answer that was judged before is not judged again, nor in a resumed run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from hotseat.failed import Failed
from hotseat.files import opened
from hotseat.rewards.answers import BadAnswer, Score
from hotseat.rewards.builtin import answer_of
from hotseat.rewards.posting import Poster, excerpt, read_json
from hotseat.rewards.rubrics import TOKEN, Combine, JudgeSettings
from hotseat.rewards.scorer import SampleGroup, Scorer, when_all_are_done
from hotseat.words import label_text, quantity

PLACES = ("prompt", "answer", "label")
_PLACE = re.compile(r"\{(" + "|".join(PLACES) + r")\}")
_MAX_TRIES = 3  # to get a verdict from a judge that answers, but writes none
_MAX_SHOWN = 120


class CutOff(Failed):
    """A judge that had no room to finish, with the reason. What it writes at another try may be shorter."""


class WritesVerdicts(Protocol):
    """The model that judges, wherever it runs."""

    def ask(self, body: Mapping[str, Any], name: str) -> Future[str | Failed]:
        """Send a chat completion request for the sample `name`; return what the judge writes.

        A judge that is cut off by `max_tokens` has written "", by another limit `CutOff`.
        """

    def close(self) -> None:
        """End all requests; what waits for them raises an error."""


class Endpoints(Poster):
    """A judge behind OpenAI-compatible endpoints, which share the work. The threads are those of `Poster`."""

    kind, url_key, token_name = "judge", "reward.judge.url", TOKEN

    def __init__(self, settings: JudgeSettings, **options: Any):
        """options: further ones of `Poster`."""
        super().__init__(
            [f"{url.rstrip('/')}/chat/completions" for url in settings.urls],
            timeout_s=settings.timeout_s,
            retries=settings.retries,
            max_open=settings.max_open,
            token=settings.token,
            **options,
        )

    def ask(self, body: Mapping[str, Any], name: str) -> Future[str | Failed]:
        return self.post(_json(body), [name], _read)


class Judge(Scorer):
    """Scores samples by the votes of a judge. A score is 0 at the low end of the scale and 1 at the high end.

    A sample is `Failed` if its rubric needs a label that it lacks, if the model does not answer (see `Poster`), or if a
    vote has no verdict after three requests. Verdicts are read in the threads of `model`.
    """

    def __init__(self, settings: JudgeSettings, model: WritesVerdicts):
        self._settings = settings
        self._model = model
        self._pattern = re.compile(settings.pattern)
        self._verdicts = VerdictFile(None if settings.cache is None else Path(settings.cache))
        self._lock = threading.Lock()
        self._asked: dict[str, Future[float | Failed]] = {}  # requests without an answer yet, by key

    def score(self, group: SampleGroup) -> Future[list[Score | Failed]]:
        samples = [
            self._votes(prompt, answer_of(query, prompt), label, name)
            for query, prompt, label, name in zip(group.queries, group.prompts, group.labels, group.ids, strict=True)
        ]
        votes = [vote for sample in samples if isinstance(sample, list) for vote in sample]
        return when_all_are_done(votes, lambda: [self._score(sample) for sample in samples])

    def close(self) -> None:
        """End all requests. Unfinished futures raise an error. A second call does nothing."""
        self._model.close()
        self._verdicts.close()

    def _votes(self, prompt: str, answer: str, label: Any, name: str) -> list[Future[float | Failed]] | Failed:
        written = label_text(label)
        if written is None and "{label}" in self._settings.rubric:
            return Failed(f"the rubric has {{label}}, and the sample has none (sample {name})")
        values = {"prompt": prompt, "answer": answer, "label": written or ""}
        # In one pass: what looks like a place in an answer is text.
        text = _PLACE.sub(lambda place: values[place[1]], self._settings.rubric)
        return [self._vote(text, number, name) for number in range(self._settings.votes)]

    def _score(self, votes: list[Future[float | Failed]] | Failed) -> Score | Failed:
        if isinstance(votes, Failed):
            return votes
        verdicts = []
        for vote in votes:
            result = vote.result()
            if isinstance(result, Failed):
                return result
            verdicts.append(result)
        low, high = self._settings.scale
        share = (combined(verdicts, self._settings.combine) - low) / (high - low)
        return Score(share, share)

    # --- one vote -----------------------------------------------------------------------------------------------------

    def _vote(self, text: str, number: int, name: str) -> Future[float | Failed]:
        """Ask for one verdict, unless the same request was made before."""
        settings = self._settings
        reading = {"pattern": settings.pattern, "scale": settings.scale, "choices": settings.choices}
        key = hashlib.sha256(_json({"request": self._body(text, number, 0), "reading": reading})).hexdigest()
        with self._lock:
            known = self._verdicts.get(key)
            if known is not None:
                done: Future[float | Failed] = Future()
                done.set_result(known)
                return done
            if key in self._asked:
                return self._asked[key]
            vote = self._asked[key] = Future()
        self._ask(text, number, name, key, vote, 0)
        return vote

    def _ask(self, text: str, number: int, name: str, key: str, vote: Future[float | Failed], num_tries: int) -> None:
        def take(answer: Future[Any]) -> None:
            try:
                result = answer.result()
                if isinstance(result, str | CutOff):
                    verdict = self._verdict(result) if isinstance(result, str) else result
                    # At temperature 0 the same words again would help nobody.
                    max_tries = _MAX_TRIES if self._settings.temperature > 0 else 1
                    if isinstance(verdict, Failed) and num_tries + 1 < max_tries:
                        self._ask(text, number, name, key, vote, num_tries + 1)
                        return
                    if isinstance(verdict, Failed):
                        result = Failed(f"{verdict.reason} ({quantity(num_tries + 1, 'request')}; sample {name})")
                    else:
                        assert isinstance(result, str)
                        self._verdicts.add(key, verdict, result)
                        result = verdict
            except BaseException as error:
                end(vote.set_exception, error)
            else:
                end(vote.set_result, result)

        def end(settle: Callable[[Any], None], result: Any) -> None:
            with self._lock:
                self._asked.pop(key, None)
            settle(result)

        try:
            answer = self._model.ask(self._body(text, number, num_tries), name)
        except BaseException as error:
            end(vote.set_exception, error)
        else:
            answer.add_done_callback(take)

    def _body(self, text: str, number: int, num_tries: int) -> dict[str, Any]:
        settings = self._settings
        body: dict[str, Any] = {
            "model": settings.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
        }
        if settings.temperature > 0:
            body["seed"] = number * _MAX_TRIES + num_tries
        return {**body, **settings.request}

    def _verdict(self, written: str) -> float | Failed:
        matches = [match[1] for match in self._pattern.finditer(written)]
        shown = repr(written if len(written) <= _MAX_SHOWN else f"...{written[-_MAX_SHOWN:]}")
        if not written:
            limit = f"reward.judge.max_tokens is {self._settings.max_tokens}"
            return Failed(f"the judge wrote nothing, or was cut off before its end ({limit})")
        if not matches or matches[-1] is None:
            return Failed(f"the judge wrote no verdict that reward.judge.pattern finds: {shown}")
        word = matches[-1].strip()
        low, high = self._settings.scale
        try:
            verdict = self._settings.choices[word.lower()] if self._settings.choices else float(word)
        except (KeyError, ValueError):
            expected = ", ".join(self._settings.choices) if self._settings.choices else "a number"
            return Failed(f"the judge's verdict is {word!r} instead of {expected}: {shown}")
        if not (math.isfinite(verdict) and low <= verdict <= high):
            return Failed(f"the judge's verdict {word} is outside its scale, {low:g} to {high:g}: {shown}")
        return verdict


def combined(verdicts: Sequence[float], how: Combine) -> float:
    """Combine votes. The majority is the most frequent verdict; of several that are as frequent, the lowest."""
    if how == "majority":
        counts = Counter(verdicts)
        return min(counts, key=lambda verdict: (-counts[verdict], verdict))
    return statistics.median(verdicts) if how == "median" else statistics.fmean(verdicts)


class VerdictFile:
    """Verdicts by the key of their request, in a file of JSON lines that is only appended to, by any number of hosts.

    Each line is one write. A line that is not whole, which a crash or another node may leave, is no verdict: its
    request is made again.
    """

    def __init__(self, path: Path | None):
        self._known: dict[str, float] = {}
        self._file = None
        self._lock = threading.Lock()
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = opened(path, "ab", buffering=0)
        content = path.read_bytes()
        for line in content.splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # not whole
                record = json.loads(line)
                self._known[record["key"]] = record["verdict"]
        if content and not content.endswith(b"\n"):
            self._file.write(b"\n")

    def get(self, key: str) -> float | None:
        return self._known.get(key)

    def add(self, key: str, verdict: float, written: str) -> None:
        with self._lock:
            self._known[key] = verdict
            if self._file is not None and not self._file.closed:
                self._file.write(json.dumps({"key": key, "verdict": verdict, "written": written}).encode() + b"\n")

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()


def _read(content: bytes, url: str) -> str:
    answer = read_json(content)
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise BadAnswer(f"its answer has no list 'choices' with one entry: {excerpt(content)}")
    message = choices[0].get("message")
    text = message.get("content") if isinstance(message, dict) else None
    if choices[0].get("finish_reason") == "length":
        return ""  # what looks like a verdict there may be a thought
    if not isinstance(text, str):
        raise BadAnswer(f"its answer has no text at choices[0].message.content: {excerpt(content)}")
    return text


def _json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True).encode()
