"""`hotseat serve-rm`: the rewards that it serves are the model's, whatever arrives together and whatever ends it."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
import transformers
from loop_cases import make_task, make_value_model
from reward_servers import WAIT_S, HeldPort
from waiting import wait_until

from hotseat.cli import main, serve_rm
from hotseat.errors import UserError
from hotseat.loop.serving.batching import Batcher, Rejected, Round, cut_by_padded_tokens
from hotseat.loop.serving.reward_server import RewardServer, ServerOptions, bound_socket
from hotseat.loop.serving.served_model import ModelOptions, RewardModel
from hotseat.model_source import ModelSource
from hotseat.openrlhf.serve_command import make_parser
from hotseat.rewards import Score
from hotseat.rewards.addresses import TOKEN, connect_problems
from hotseat.rewards.posting import RewardService

pytestmark = pytest.mark.slow

TEXTS = ["1+2=77<eos>", "3+4=7", "5+6=11777<eos>", "1+1=", "7"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A reward model over the task's digits, in the folder `reward_model` of the task."""
    task = make_task(tmp_path_factory.mktemp("serving"))
    return make_value_model(task / "reward_model", mean=2.0, std=4.0)


def expected(folder: Path, texts: list[str]) -> list[float]:
    """The rewards by transformers alone, one text at a time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return [
            model(**tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits[0, 0].item()
            for text in texts
        ]


def scores(model: RewardModel, texts: list[str]) -> list[float]:
    return model.score(model.tokenize(texts))


# --- the model --------------------------------------------------------------------------------------------------------


def test_a_batch_gets_the_rewards_that_each_text_gets_alone(folder):
    model = RewardModel(ModelOptions(ModelSource(str(folder))))
    assert [scores(model, [text])[0] for text in TEXTS] == expected(folder, TEXTS)  # bit for bit
    assert scores(model, TEXTS) == pytest.approx(expected(folder, TEXTS), abs=1e-5)
    assert model.max_length == 32
    assert "LlamaForSequenceClassification" in model.description


def test_rewards_are_normalised_by_what_training_stored(folder):
    plain, normalised = (RewardModel(ModelOptions(ModelSource(str(folder)), normalize=each)) for each in (False, True))
    assert scores(normalised, TEXTS) == pytest.approx([(each - 2) / 4 for each in scores(plain, TEXTS)], abs=1e-6)


def test_a_head_of_another_name_is_found(folder, tmp_path):
    """As OpenRLHF's `--value_head_prefix value_head` writes it."""
    from safetensors.torch import load_file, save_file

    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["value_head.weight"] = weights.pop("score.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    renamed = RewardModel(ModelOptions(ModelSource(str(tmp_path)), value_head_prefix="value_head"))
    assert scores(renamed, TEXTS) == scores(RewardModel(ModelOptions(ModelSource(str(folder)))), TEXTS)
    with pytest.raises(UserError, match=r"it lacks 1 weight of a Llama.*such as score.weight; .*\(now 'score'\)"):
        RewardModel(ModelOptions(ModelSource(str(tmp_path))))


def test_a_classifier_that_reads_both_ways_gets_its_own_special_tokens(folder, tmp_path):
    from tokenizers import processors

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A <eos>", special_tokens=[("<eos>", 1)]
    )
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    shape = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(**shape, intermediate_size=16, max_position_embeddings=32, num_labels=1)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    model = RewardModel(ModelOptions(ModelSource(str(tmp_path))))
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    rows = [tokenizer(text, return_tensors="pt")["input_ids"] for text in TEXTS]
    assert rows[4].tolist() == [[1, 9, 1]]
    with torch.no_grad():
        alone = [reference(input_ids=row).logits[0, 0].item() for row in rows]
    assert scores(model, TEXTS) == pytest.approx(alone, abs=1e-5)


def test_models_that_are_no_reward_models_are_refused(folder, tmp_path):
    with pytest.raises(UserError, match="is no reward model: it lacks 1 weight of a Llama.*such as score.weight"):
        RewardModel(ModelOptions(ModelSource(str(folder.parent / "model"))))
    with pytest.raises(UserError, match="no tokenizer there"):
        RewardModel(ModelOptions(ModelSource(str(tmp_path / "nothing"))))
    two = make_value_model(folder.parent / "two_labels", num_labels=2)
    with pytest.raises(UserError, match=r"its score.weight has the shape \[2, 16\], and a reward is one number"):
        RewardModel(ModelOptions(ModelSource(str(two))))
    plain = make_value_model(folder.parent / "no_scale")
    with pytest.raises(UserError, match="normalising needs the mean and the std"):
        RewardModel(ModelOptions(ModelSource(str(plain)), normalize=True))


# --- batches ----------------------------------------------------------------------------------------------------------


def test_sequences_of_like_length_are_padded_together():
    assert cut_by_padded_tokens([2, 9, 3, 8, 20], 18) == [[4], [1, 3], [2, 0]]
    assert cut_by_padded_tokens([], 10) == []


class Counting:
    """A model whose reward is the text's length; texts that arrive while it works wait for it."""

    max_length = 8

    def __init__(self) -> None:
        self.begun, self.may_work = threading.Event(), threading.Event()
        self.rounds: list[int] = []

    def tokenize(self, texts):
        self.begun.set()
        self.may_work.wait(WAIT_S)
        self.rounds.append(len(texts))
        return [list(text) for text in texts]

    def score(self, sequences):
        if any("!" in sequence for sequence in sequences):
            raise ValueError("a text that the model dies of")
        return [float(len(sequence)) for sequence in sequences]


def in_batcher(model, requests: list[list[str]], **options) -> tuple[list, list[Round]]:
    """Submit requests: the first alone, the others while it is scored."""
    noted: list[Round] = []

    async def submit() -> list:
        batcher = Batcher(model, options.get("max_tokens", 100), noted.append)
        running = asyncio.create_task(batcher.run())
        first = asyncio.create_task(batcher.submit(requests[0]))
        await asyncio.sleep(0)
        while batcher.num_waiting:
            await asyncio.sleep(0)
        others = [asyncio.create_task(batcher.submit(texts)) for texts in requests[1:]]
        await asyncio.sleep(0)
        model.may_work.set()
        results = await asyncio.gather(first, *others, return_exceptions=True)
        running.cancel()
        return [getattr(each, "rewards", each) for each in results]

    return asyncio.run(submit()), noted


def test_what_arrives_while_the_model_works_is_scored_together():
    model = Counting()
    results, noted = in_batcher(model, [["a"], ["bb", "ccc"], ["d"], ["eeee"]])
    assert results == [[1.0], [2.0, 3.0], [1.0], [4.0]]
    assert model.rounds == [1, 4]
    assert noted == [Round(1, 1, 1), Round(4, 10, 1)]


def test_a_round_takes_no_more_than_the_budget_but_at_least_one_request():
    model = Counting()
    results, _ = in_batcher(model, [["a"], ["b" * 8] * 3, ["c" * 4], ["d" * 4]], max_tokens=2)  # about 8 characters
    assert results == [[1.0], [8.0] * 3, [4.0], [4.0]]
    assert model.rounds == [1, 3, 2]


def test_a_text_that_cannot_be_scored_fails_its_request_alone():
    results, _ = in_batcher(Counting(), [["a"], ["bb", ""], ["c" * 9], ["d"]])
    assert results[0] == [1.0]
    assert results[3] == [1.0]
    assert isinstance(results[1], Rejected)
    assert str(results[1]) == "query[1] is empty: it has no tokens"
    assert "query[0] has 9 tokens, and the longest text has 8" in str(results[2])


def test_a_text_that_cannot_be_tokenized_fails_its_request_alone():
    class Strict(Counting):
        def tokenize(self, texts):
            for text in texts:
                text.encode()
            return super().tokenize(texts)

    results, _ = in_batcher(Strict(), [["a"], ["bb"], ["c", "\ud800"], ["d"]])
    assert [results[0], results[1], results[3]] == [[1.0], [2.0], [1.0]]
    assert isinstance(results[2], Rejected)
    assert "the texts in 'query' cannot be tokenized: UnicodeEncodeError" in str(results[2])


def test_a_model_that_raises_fails_the_round_and_works_on():
    model = Counting()
    results, _ = in_batcher(model, [["!"], ["b"]])
    assert isinstance(results[0], ValueError)
    assert results[1] == [1.0]


# --- the server -------------------------------------------------------------------------------------------------------


@contextmanager
def serving(model, **options):
    """Serve a model from a thread; yields the address."""
    settings = ServerOptions(port=0, **options)
    bound = bound_socket(settings)
    ready = threading.Event()
    held: dict = {}

    async def serve() -> None:
        held["loop"], held["stop"] = asyncio.get_running_loop(), asyncio.Event()
        await RewardServer(model, settings).serve(bound, held["stop"], ready.set)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(WAIT_S)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        held["loop"].call_soon_threadsafe(held["stop"].set)
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def address(folder):
    with serving(RewardModel(ModelOptions(ModelSource(str(folder)))), max_request_bytes=2000) as address:
        yield address


def ask(url: str, body: object = None, token: str | None = None) -> tuple[int, object]:
    """POST a body, or GET; returns status and answer."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            status, text = response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    return status, json.loads(text) if text.startswith("{") else text


def test_the_server_answers_in_openrlhfs_form_with_the_models_rewards(folder, address):
    body = {"query": TEXTS, "prompts": ["p"] * 5, "labels": [None] * 5}
    for route in ("/get_reward", "/"):
        status, answer = ask(address + route, body)
        assert status == 200
        assert answer["rewards"] == pytest.approx(expected(folder, TEXTS), abs=1e-5)
        assert answer["scores"] == answer["rewards"]
        assert answer["extra_logs"] == {}
    assert ask(f"{address}/get_reward", {"query": []})[1]["rewards"] == []


def test_our_client_gets_the_models_rewards_from_many_requests_at_a_time(folder, address):
    groups = [[f"{a}+{b}={a * b % 100}<eos>" for b in range(1, 5)] for a in range(1, 17)]
    with RewardService([f"{address}/get_reward"], timeout_s=WAIT_S) as service:
        futures = [service.submit(group, ["p"] * 4, ["l"] * 4, range(4)) for group in groups]
        found = [sample.reward for future in futures for sample in future.result(WAIT_S)]
    assert found == pytest.approx(expected(folder, [text for group in groups for text in group]), abs=1e-5)


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"{", 422, "the request is no JSON: "),
        ([], 422, "no JSON object with 'query', the list of texts"),
        ({"queries": ["a"]}, 422, "no JSON object with 'query', the list of texts"),
        ({"query": "7"}, 422, "'query' is a str, not a list of texts"),
        ({"query": ["7", 7]}, 422, "query[1] is a int, not a text"),
        ({"query": ["7", "7\ud800"]}, 422, "query[1] has a lone surrogate, which is no character: UnicodeEncodeError"),
        ({"query": ["7"], "labels": ["a", "b"]}, 422, "'labels' is no list with an entry for each of the 1 texts"),
        ({"query": ["7", ""]}, 422, "query[1] is empty"),
        ({"query": ["7" * 33]}, 422, "query[0] has 33 tokens, and the longest text has 32"),
        ({"query": ["7" * 3000]}, 413, "the request is larger than 0.00190735 MiB"),
    ],
)
def test_a_wrong_request_is_answered_with_the_reason(address, body, status, reason):
    found, answer = ask(f"{address}/get_reward", body)
    assert found == status
    assert reason in answer["error"]


def test_health_metrics_and_other_routes(address):
    assert ask(f"{address}/health") == (200, {"status": "ok", "waiting": 0})
    ask(f"{address}/get_reward", {"query": ["7", "77"]})
    status, text = ask(f"{address}/metrics")
    assert status == 200
    counts = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(counts['hotseat_rm_requests_total{status="200"}']) >= 1
    assert float(counts["hotseat_rm_texts_total"]) >= 2
    assert float(counts["hotseat_rm_tokens_total"]) >= 3
    assert float(counts["hotseat_rm_waiting_requests"]) == 0
    status, answer = ask(f"{address}/other", {})
    assert (status, answer["error"]) == (
        404,
        "POST /other: Not Found; there are POST /get_reward (or /), GET /health, GET /metrics",
    )
    assert ask(f"{address}/get_reward")[0] == 405


def test_with_a_token_only_those_that_have_it_are_answered():
    model = Counting()
    model.may_work.set()
    with serving(model, token="abc") as address:
        for token in (None, "abd", "ab"):
            status, answer = ask(f"{address}/get_reward", {"query": ["7"]}, token)
            assert status == 401
            assert "'Authorization: Bearer TOKEN' is missing or wrong" in answer["error"]
            assert ask(f"{address}/metrics", token=token)[0] == 401
        assert ask(f"{address}/get_reward", {"query": ["7"]}, "abc")[1]["rewards"] == [1.0]
        assert ask(f"{address}/health")[0] == 200
        with RewardService([f"{address}/get_reward"], token="abc") as service:
            assert service.submit(["77"], ["p"], ["l"], [0]).result(WAIT_S) == [Score(2.0, 2.0)]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Expect: 100-continue", 401),
        ("Content-Encoding: gzip", 401),
        ("Authorization: Bearer abc\xff", 401),
        ("Authorization: Bearer abc\r\nContent-Encoding: gzip", 415),
        ("Authorization: Bearer abc\r\nExpect: 100-continue", 100),
    ],
)
def test_a_body_is_neither_read_nor_asked_for_before_its_request_is_allowed(headers, status):
    with serving(Counting(), token="abc") as address:
        url = urlsplit(address)
        with socket.create_connection((url.hostname, url.port), WAIT_S) as connection:
            connection.sendall(
                f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 300000\r\n{headers}\r\n\r\n".encode("latin1")
            )
            with connection.makefile("rb") as answer:
                assert answer.readline().split()[1] == str(status).encode()


def test_connections_without_the_token_make_way_for_others(monkeypatch):
    monkeypatch.setattr("hotseat.connections._MAX_UNKNOWN", 60)
    model = Counting()
    model.may_work.set()
    with serving(model, token="abc") as address, ExitStack() as opened:
        url = urlsplit(address)
        silent = [opened.enter_context(socket.create_connection((url.hostname, url.port), WAIT_S)) for _ in range(100)]
        for connection in silent[:40]:
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        assert ask(f"{address}/get_reward", {"query": ["7"]}, "abc")[1]["rewards"] == [1.0]


def test_a_model_that_raises_is_500_and_no_reward_of_it_is_a_number():
    class Odd(Counting):
        def score(self, sequences):
            return [float("nan")] if sequences == [["n"]] else super().score(sequences)

    model = Odd()
    model.may_work.set()
    with serving(model) as address:
        assert ask(f"{address}/get_reward", {"query": ["!"]}) == (
            500,
            {"error": "ValueError: a text that the model dies of"},
        )
        assert ask(f"{address}/get_reward", {"query": ["n"]})[1]["rewards"] == [None]


def test_too_many_requests_are_sent_away_for_a_while():
    model = Counting()
    with serving(model, max_waiting=1) as address:
        found: list = []

        def send() -> None:
            found.append(ask(f"{address}/get_reward", {"query": ["7"]}))

        threads = [threading.Thread(target=send) for _ in range(2)]
        threads[0].start()
        assert model.begun.wait(WAIT_S)
        threads[1].start()
        wait_until(lambda: ask(f"{address}/health")[1]["waiting"] == 1)
        status, answer = ask(f"{address}/get_reward", {"query": ["7"]})
        assert (status, answer["error"]) == (429, "1 requests wait already: send it again later")
        model.may_work.set()
        for thread in threads:
            thread.join(WAIT_S)
        assert [status for status, _ in found] == [200, 200]


def test_a_server_that_stops_answers_what_has_arrived_and_takes_no_more():
    model, found = Counting(), []

    def release_when_closed(address: str) -> None:
        wait_until(lambda: connect_problems([address], WAIT_S))
        model.may_work.set()

    with serving(model) as address:
        sending = threading.Thread(target=lambda: found.append(ask(f"{address}/get_reward", {"query": ["7"]})))
        sending.start()
        assert model.begun.wait(WAIT_S)
        threading.Thread(target=release_when_closed, args=(address,), daemon=True).start()
    sending.join(WAIT_S)
    assert found == [(200, {"rewards": [1.0], "scores": [1.0], "extra_logs": {}})]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_an_open_address_needs_a_token(host):
    with pytest.raises(UserError, match=rf"host {host}: other machines could use .*there is no token: set .*{TOKEN}"):
        bound_socket(ServerOptions(host=host))
    if host == "0.0.0.0":
        bound_socket(ServerOptions(host=host, port=0, token="abc")).close()


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on port {port} of 127.0.0.1: Address already in use"):
            bound_socket(ServerOptions(port=port))


# --- the commands -----------------------------------------------------------------------------------------------------


def test_openrlhfs_default_address_is_answered_with_what_to_set(folder, capsys, monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    assert serve_rm.main(["--reward_pretrain", str(folder), "--flash_attn", "--batch_size", "8"]) == 2
    said = capsys.readouterr().err
    assert "no effect here: --flash_attn because torch's own attention" in said
    assert "no effect here: --batch_size because batches are cut by their tokens" in said
    assert "serve_rm: host 0.0.0.0: other machines could use the server" in said
    assert "(--host 127.0.0.1; OpenRLHF's default is 0.0.0.0)" in said
    assert serve_rm.main([]) == 2
    assert "--reward_pretrain is not set" in capsys.readouterr().err
    assert serve_rm.main(["--reward.model_name_or_path", "m", "--ds.load_in_4bit"]) == 2
    assert "--load_in_4bit is not part of this version" in capsys.readouterr().err
    assert serve_rm.main(["--reward_pretrain", "m", "--use_ms"]) == 2
    assert "--use_ms is not part of this version" in capsys.readouterr().err


def test_the_page_has_every_flag_of_serve_rm():
    page = (Path(__file__).parents[3] / "docs" / "openrlhf.md").read_text()
    table = page.partition("## `serve_rm`")[2].partition("## Every flag")[0]
    listed = set(re.findall(r"`(--[\w.]+)`", table))
    flags = {flag for action in make_parser()._actions for flag in action.option_strings}
    assert flags - {"-h", "--help"} == listed


def test_wrong_arguments_are_refused_before_a_model_loads(capsys):
    for arguments, problem in (
        (["--port", "70000"], "--port 70000: must be from 0 to 65535"),
        (["--max-length", "0"], "--max-length 0: must be above 0"),
        (["--host", "0.0.0.0"], "host 0.0.0.0: other machines could use the server"),
    ):
        assert main.main(["serve-rm", "nothing", *arguments]) == 2
        assert problem in capsys.readouterr().err
    assert main.main(["serve-rm", "/no/model"]) == 2
    assert "there is no folder /no/model" in capsys.readouterr().err


class ServerProcess:
    """A server in a process of its own."""

    def __init__(self, *command: str):
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, env=env)

    def wait_until_ready(self) -> str:
        while line := self.process.stdout.readline():
            if line.startswith("serving "):
                return line.rstrip()
        raise AssertionError(f"it ended with {self.process.wait()}")

    def end(self, number: int = signal.SIGKILL) -> int:
        if self.process.stdout.closed:
            return self.process.returncode
        self.process.send_signal(number)
        code = self.process.wait(WAIT_S)
        self.process.stdout.close()
        return code


def killed_and_restarted(groups: list[list[str]], first: Callable[[int], ServerProcess], second=None) -> list[list]:
    """Have groups scored by a server that is killed meanwhile and started again; first, second: start it at a port."""
    held = HeldPort()
    server = first(held.port)
    try:
        assert held.url in server.wait_until_ready()
        with RewardService([held.url], timeout_s=600.0, max_open=16, report=lambda line: None) as service:
            futures = [service.submit(group, ["p"] * 2, ["l"] * 2, range(2)) for group in groups]
            wait_until(lambda: sum(future.done() for future in futures) > 50)
            server.end()
            assert not all(future.done() for future in futures)
            server = (second or first)(held.port)
            server.wait_until_ready()
            found = [future.result(WAIT_S) for future in futures]
        assert server.end(signal.SIGTERM) == 0
    finally:
        server.end()
        held.close()
    return found


GROUPS = [[f"{a}+{b}={a + b}<eos>" for b in range(2)] for a in range(10, 99)] * 8


def test_killed_and_restarted_under_load_clients_go_on():
    """SIGTERM is an ordinary end."""
    program = str(Path(__file__).parents[2] / "helpers" / "counting_server.py")
    found = killed_and_restarted(GROUPS, lambda port: ServerProcess(program, str(port)))
    assert [[sample.reward for sample in samples] for samples in found] == [
        [float(text.count("7")) for text in group] for group in GROUPS
    ]


@pytest.mark.long
def test_a_model_that_is_killed_and_restarted_under_load_gives_the_same_rewards(folder):
    """By OpenRLHF's command the second time."""

    def ours(port: int) -> ServerProcess:
        return ServerProcess("-m", "hotseat", "serve-rm", str(folder), "--port", str(port), "--threads", "1")

    def theirs(port: int) -> ServerProcess:
        flags = ("--reward_pretrain", str(folder), "--host", "127.0.0.1", "--port", str(port))
        return ServerProcess("-m", "hotseat.cli.serve_rm", *flags)

    found = killed_and_restarted(GROUPS, ours, theirs)
    texts = [text for group in GROUPS[:89] for text in group]
    want = dict(zip(texts, expected(folder, texts), strict=True))
    for group, samples in zip(GROUPS, found, strict=True):
        assert [sample.reward for sample in samples] == pytest.approx([want[text] for text in group], abs=1e-5)
