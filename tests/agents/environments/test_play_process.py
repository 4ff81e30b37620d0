"""The function `play` of a user's file, in a process of its own: what it sees, prints, blocks and ends."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from chat_templates import tokenizer_of
from gateway_cases import SAMPLING, WAIT_S, Engine, Outcome

from hotseat.agents import AgentHost, Deadlines, load_agent
from hotseat.agents.environments import environment_process, lazy_certificates
from hotseat.agents.episode_output import EpisodeOutput, captured
from hotseat.types import Failed, Prompt, SampleKey, ScoredEpisode

pytestmark = pytest.mark.slow

ASK = """
import asyncio, os, sys, time

with open(os.environ["LOADED"], "a") as file:
    file.write(f"{os.getpid()}\\n")

async def ask(client):
    return await asyncio.to_thread(client.ask, [{"role": "user", "content": "bad?"}])

"""


@pytest.fixture
def loaded(tmp_path, monkeypatch) -> Path:
    """A file to which every process writes that runs the user's file."""
    monkeypatch.setenv("LOADED", str(tmp_path / "loaded"))
    return tmp_path / "loaded"


def host_of(tmp_path: Path, code: str, engine: Engine | None = None, **options: Any) -> AgentHost:
    file = tmp_path / "agent.py"
    file.write_text(ASK + textwrap.dedent(code))
    agent = load_agent(file, tokenizer_of("smollm2"), max_length=600)
    return AgentHost(agent, engine or Engine("cab"), run_seed=5, **{"timeout_s": WAIT_S, **options})


def submit(host: AgentHost, *labels: Any) -> list[Any]:
    return [
        host.submit(Prompt(3, "bad?", (1,), label), SampleKey(0, 3, at), SAMPLING) for at, label in enumerate(labels)
    ]


def line_of(tmp_path: Path, text: str) -> str:
    lines = (tmp_path / "agent.py").read_text().splitlines()
    return f"{tmp_path}/agent.py:{1 + next(at for at, line in enumerate(lines) if text in line)}"


def reason(outcome: Outcome) -> str:
    assert isinstance(outcome, Failed), outcome
    return outcome.reason.partition(": sample ")[2].partition(": ")[2]


def test_play_runs_elsewhere_with_the_environment_and_the_folder_of_the_host(tmp_path, loaded, monkeypatch):
    monkeypatch.setenv("FOR_THE_JUDGE", "secret")
    code = """
        async def play(prompt, client):
            answer = await ask(client)
            is_same = os.environ["FOR_THE_JUDGE"] == "secret" and os.getcwd() == prompt.label["folder"]
            return {"reward": len(answer), "extra": {"is_same": is_same, "process": os.getpid()}}
    """
    with host_of(tmp_path, code) as host:
        outcomes = [future.result(WAIT_S) for future in submit(host, *[{"folder": os.getcwd()}] * 3)]
    assert [outcome.reward for outcome in outcomes] == [3.0] * 3
    assert all(outcome.extra["is_same"] for outcome in outcomes)
    processes = {int(outcome.extra["process"]) for outcome in outcomes}
    # The file was run there, once, and not here.
    assert loaded.read_text() == f"{processes.pop()}\n" != f"{os.getpid()}\n"
    assert not processes


def test_what_play_prints_and_its_traceback_are_kept_under_its_episode(tmp_path, loaded):
    code = """
        import threading

        async def play(prompt, client):
            print("line of", prompt.label, file=sys.stderr)
            await asyncio.to_thread(print, "in a thread of", prompt.label)
            await ask(client)
            print("no end of a line", end="")
            if prompt.label == "much":
                for _ in range(100_000):
                    print("x" * 100)
            if prompt.label == "raises":
                raise ValueError("no luck")
            return 1.0
    """
    output = EpisodeOutput(tmp_path / "agents.log")
    with captured(False, lambda: None), host_of(tmp_path, code, output=output) as host:
        outcomes = [future.result(WAIT_S) for future in submit(host, "first", "raises", "much")]
    output.close()
    first, raised, much = outcomes
    assert isinstance(first, ScoredEpisode)
    assert isinstance(much, ScoredEpisode)
    assert reason(raised) == f"the agent raised ValueError: no luck ({line_of(tmp_path, 'raise ValueError')})"
    lines = (tmp_path / "agents.log").read_text().splitlines()
    of = {at: [line.partition("  ")[2] for line in lines if line.startswith(f"0/3/{at}  ")] for at in range(3)}
    assert of[0] == ["line of first", "in a thread of first", "no end of a line"]
    assert of[1][:3] == ["line of raises", "in a thread of raises", "no end of a line"]
    assert of[1][-1] == "ValueError: no luck"
    assert "more than 64 Ki characters: the rest is not kept" in of[2][-1]
    assert sum(map(len, of[2])) < 70_000


@pytest.mark.parametrize("form", ["async def play", "def play"])
def test_an_exit_names_the_users_line_and_the_others_go_on(tmp_path, loaded, form):
    code = f"""
        {form}(prompt, client):
            if prompt.label == "exits":
                sys.exit("enough")
            return float(len(client.ask([{{"role": "user", "content": "bad?"}}])))
    """
    with host_of(tmp_path, code) as host:
        exits, other = (future.result(WAIT_S) for future in submit(host, "exits", "other"))
    kind = "RuntimeError: SystemExit" if form == "def play" else "SystemExit"
    assert reason(exits) == f"the agent raised {kind}: enough ({line_of(tmp_path, 'sys.exit')})"
    assert other.reward == 3.0
    assert loaded.read_text().count("\n") == 1  # in the same process


def test_an_episode_that_ends_its_process_twice_fails_by_its_line_and_the_others_are_played_again(tmp_path, loaded):
    code = """
        async def play(prompt, client):
            answer = await ask(client)
            if prompt.label == "ends":
                os._exit(3)
            while prompt.label == "waits" and open(os.environ["LOADED"]).read().count("\\n") < 2:
                await asyncio.sleep(0.01)
            return float(len(answer))
    """
    with host_of(tmp_path, code) as host:
        ends, waits, other = (future.result(WAIT_S) for future in submit(host, "ends", "waits", "other"))
    where = line_of(tmp_path, "os._exit")
    assert reason(ends) == f"its process ended twice with it: exit code 3, by os._exit at {where}"
    assert (waits.reward, other.reward) == (3.0, 3.0)
    assert waits.episode.num_sampled == other.episode.num_sampled  # of the second time alone
    # The first process, the one for the rest, and the one in which the suspect was alone.
    assert loaded.read_text().count("\n") == 3


def test_of_those_whose_code_ran_when_a_process_was_killed_only_the_one_that_kills_it_again_fails(tmp_path, loaded):
    code = """
        async def play(prompt, client):
            answer = await ask(client)
            if prompt.label == "kills":
                os.kill(os.getpid(), 9)
            while open(os.environ["LOADED"]).read().count("\\n") < 2:
                await asyncio.sleep(0.01)
            return float(len(answer))
    """
    with host_of(tmp_path, code) as host:
        kills, other = (future.result(WAIT_S) for future in submit(host, "kills", "other"))
    assert reason(kills).startswith("its process ended twice with it: signal 9")
    assert other.reward == 3.0


@pytest.mark.long
def test_what_blocks_the_loop_is_warned_of_and_ended_and_the_others_are_played_again(
    tmp_path, loaded, monkeypatch, caplog
):
    monkeypatch.setattr(environment_process, "_BLOCKED_S", 0.2)
    code = """
        async def play(prompt, client):
            answer = await ask(client)
            if prompt.label == "blocks":
                time.sleep(10_000)
            return float(len(answer))
    """
    with host_of(tmp_path, code, deadlines=Deadlines(tool_s=20.0)) as host:
        blocks = submit(host, "blocks")[0].result(WAIT_S)
        assert "took longer than 20 s between answers" in reason(blocks)
        again = host.submit(Prompt(4, "bad?", (1,), "other"), SampleKey(0, 4, 0), SAMPLING).result(WAIT_S)
    assert again.reward == 3.0
    assert f"{line_of(tmp_path, 'time.sleep')} blocks the event loop, which all episodes share" in caplog.text
    assert loaded.read_text().count("\n") == 2


@pytest.mark.long
def test_the_time_that_others_block_is_left_out_of_an_episodes_clock(tmp_path, loaded):
    code = """
        async def play(prompt, client):
            if prompt.label == "waits":  # for less than tools may take, but for what the other one blocks
                while not os.path.exists(os.environ["LOADED"] + ".blocked"):
                    await asyncio.sleep(0.01)
            else:
                await ask(client)
                time.sleep(25)
                open(os.environ["LOADED"] + ".blocked", "w").close()
            return float(len(await ask(client)))
    """
    with host_of(tmp_path, code, deadlines=Deadlines(tool_s=20.0)) as host:
        waits, blocks = (future.result(WAIT_S) for future in submit(host, "waits", "blocks"))
    assert "took longer than 20 s between answers" in reason(blocks)
    assert waits.reward == 3.0, waits


def test_a_file_for_openrlhf_finds_its_helpers(tmp_path, loaded):
    code = """
        from openrlhf.utils import extract_boxed_answer

        async def play(prompt, client):
            await ask(client)
            return float(extract_boxed_answer("so \\\\boxed{7}"))
    """
    with host_of(tmp_path, code) as host:
        assert submit(host, "a")[0].result(WAIT_S).reward == 7.0


# --- certificates -----------------------------------------------------------------------------------------------------


has_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate by openssl")


@pytest.fixture
def lazy(monkeypatch) -> list[object]:
    """Have contexts read late. Returns each one that has read, when it does."""
    read: list[object] = []

    def reads(name: str) -> Any:
        usual = getattr(ssl.SSLContext, name)

        def read_as_usual(self: ssl.SSLContext, *files: Any) -> None:
            read.append(self)
            usual(self, *files)

        return read_as_usual

    for name in lazy_certificates.USERS:
        monkeypatch.setattr(ssl.SSLContext, name, getattr(ssl.SSLContext, name))
    for name in lazy_certificates.READERS:
        monkeypatch.setattr(ssl.SSLContext, name, reads(name))
    lazy_certificates.install()
    return read


def create_as_httpx_does(cafile: str | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile or ssl.get_default_verify_paths().openssl_cafile, None)
    return context


def make_certificate(folder: Path) -> str:
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run([*words.split(), *files], check=True, capture_output=True)
    return str(folder / "cert.pem")


@has_openssl
@pytest.mark.parametrize("create", [ssl.create_default_context, create_as_httpx_does])
def test_contexts_read_certificates_when_they_are_first_needed(lazy, create, tmp_path):
    cafile = make_certificate(tmp_path)
    first = create(cafile=cafile)  # which finds out whether they can be read
    assert lazy == [first]
    context = create(cafile=cafile)
    for name in ("check_hostname", "verify_mode", "verify_flags", "options", "minimum_version", "maximum_version"):
        assert getattr(context, name) == getattr(first, name), name
    assert lazy == [first]
    context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname="localhost")
    assert context.get_ca_certs() == first.get_ca_certs() != []
    assert lazy == [first, context]
    with pytest.raises(FileNotFoundError):
        create(cafile=str(tmp_path / "nothing.pem"))


def test_the_certificates_of_the_machine_are_read_late_too(lazy):
    context = ssl.create_default_context()
    assert lazy == []
    assert context.cert_store_stats()["x509"] >= 0
    assert lazy == [context]


@has_openssl
def test_a_server_whose_certificate_is_not_trusted_is_refused_as_usual(lazy, tmp_path):
    cafile = make_certificate(tmp_path)
    for _ in range(2):
        trusting = ssl.create_default_context(cafile=cafile)
        shake_hands(trusting, tmp_path)
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(ssl.create_default_context(), tmp_path)
    assert len(lazy) == 4


def shake_hands(client_side: ssl.SSLContext, folder: Path) -> None:
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_side.wrap_bio(back, there, server_hostname="localhost")
    server = server_side.wrap_bio(there, back, server_side=True)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    assert client.version() is not None


def test_a_client_made_here_is_as_before():
    code = "import ssl; reads = ssl.SSLContext.load_verify_locations; "
    code += "import hotseat.agents.environments.environment_worker"
    checked = "assert ssl.SSLContext.load_verify_locations is reads"
    assert subprocess.run([sys.executable, "-c", f"{code}; {checked}"]).returncode == 0
