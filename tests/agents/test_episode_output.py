"""What agents print is kept by episode, within bounds, and nothing else is changed."""

import asyncio
import io
import logging
import sys
import threading
import warnings

from agent_cases import SAMPLING, TOKENIZER, WAIT_S, Script, prompt_of

from hotseat.agents import Agent, AgentHost, Environment, MultiTurn, SingleTurn, Step
from hotseat.agents.episode_output import MAX_ECHO_CHARS, MAX_EPISODE_CHARS, EpisodeLog, EpisodeOutput, captured
from hotseat.types import SampleKey


def played(agent, tmp_path, num_episodes=1, *, has_echo=False, monkeypatch=None):
    """Play episodes; return the lines that were kept, by episode, and what reached the console."""
    console = io.StringIO()
    monkeypatch.setattr(sys, "stdout", console)
    monkeypatch.setattr(sys, "stderr", console)
    output = EpisodeOutput(tmp_path / "logs" / "agents-0.log")
    full = []
    with captured(has_echo, lambda: full.append(1)):
        with AgentHost(agent, Script(lambda request: "a"), run_seed=0, output=output) as host:
            samples = [(prompt_of("q", str(at)), SampleKey(0, 7, at)) for at in range(num_episodes)]
            for future in host.submit_many(samples, SAMPLING):
                future.result(WAIT_S)
        print("from elsewhere")
    output.close()
    assert sys.stdout is console
    lines: dict[str, list[str]] = {}
    if output.file.exists():
        for line in output.file.read_text().splitlines():
            key, _, text = line.partition("  ")
            lines.setdefault(key, []).append(text)
    return lines, console.getvalue(), len(full)


class Prints(Environment):
    def reset(self, prompt, label):
        self.label = label
        print("reset", label, end="")
        print(", in two parts")

    async def step(self, action):
        await asyncio.sleep(0.01)
        print("two\nlines", self.label, file=sys.stderr)
        warnings.warn(f"careful {self.label}", stacklevel=1)
        logging.getLogger("of the user").error("logged %s", self.label)
        await asyncio.to_thread(print, "in a thread", self.label)
        print("without an end", end="")
        return Step("", reward=1.0, done=True)


def test_prints_of_every_kind_are_kept_under_their_episode(tmp_path, monkeypatch):
    monkeypatch.setattr(logging, "lastResort", logging._StderrHandler(logging.WARNING))
    monkeypatch.setattr(logging.getLogger("of the user"), "propagate", False)
    agent = MultiTurn(Prints, TOKENIZER, max_length=100)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda message, *_: print(message, file=sys.stderr))
        lines, console, _ = played(agent, tmp_path, 3, monkeypatch=monkeypatch)
    assert console == "from elsewhere\n"
    assert sorted(lines) == ["0/7/0", "0/7/1", "0/7/2"]
    for at in range(3):
        assert lines[f"0/7/{at}"] == [
            f"reset {at}, in two parts", "two", f"lines {at}", f"careful {at}", f"logged {at}", f"in a thread {at}",
            "without an end",
        ]  # fmt: skip


def test_an_error_is_kept_with_its_traceback(tmp_path, monkeypatch):
    class Raises(Agent):
        async def run(self, prompt, key, sampling, sample):
            await SingleTurn(TOKENIZER).run(prompt, key, sampling, sample)
            raise ZeroDivisionError("by nothing")

    lines, _, _ = played(Raises(), tmp_path, monkeypatch=monkeypatch)
    assert lines["0/7/0"][0] == "Traceback (most recent call last):"
    assert lines["0/7/0"][-1] == "ZeroDivisionError: by nothing"
    assert any("test_episode_output.py" in line for line in lines["0/7/0"])


class PrintsMuch(Environment):
    def step(self, action):
        for _ in range(40):
            print("x" * 9999)
        return Step("", reward=1.0, done=True)


def test_an_episode_that_prints_much_is_cut(tmp_path, monkeypatch):
    agent = MultiTurn(PrintsMuch, TOKENIZER, max_length=100)
    lines, console, _ = played(agent, tmp_path, 2, monkeypatch=monkeypatch)
    for kept in lines.values():
        assert sum(len(line) + 1 for line in kept) <= MAX_EPISODE_CHARS + 100
        assert kept[-1] == "... more than 64 Ki characters: the rest is not kept"
    assert console == "from elsewhere\n"


def test_a_console_shows_what_is_printed_up_to_a_bound(tmp_path, monkeypatch):
    agent = MultiTurn(PrintsMuch, TOKENIZER, max_length=100)
    lines, console, num_full = played(agent, tmp_path, 2, has_echo=True, monkeypatch=monkeypatch)
    assert num_full == 1
    assert console.startswith("x" * 9999)
    assert len(console) == MAX_ECHO_CHARS + len("from elsewhere\n")
    assert len(lines) == 2


def test_a_file_that_is_full_is_followed_by_another(tmp_path, monkeypatch):
    monkeypatch.setattr("hotseat.agents.episode_output.MAX_FILE_BYTES", 1000)
    output = EpisodeOutput(tmp_path / "agents-0.log")
    for at in range(30):
        EpisodeLog(f"0/0/{at}", output).write("y" * 99 + "\n")
    output.close()
    assert (tmp_path / "agents-0.log.1").stat().st_size <= 1200
    assert (tmp_path / "agents-0.log").read_text().splitlines()[-1].startswith("0/0/29  yyy")


def test_threads_that_print_at_the_same_time_do_not_mix_lines(tmp_path):
    output = EpisodeOutput(tmp_path / "agents-0.log")
    logs = [EpisodeLog(f"0/0/{at}", output) for at in range(4)]

    def write(log):
        for number in range(200):
            log.write(f"line {number} of ")
            log.write(f"{log.key}\n")

    threads = [threading.Thread(target=write, args=(log,)) for log in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    output.close()
    lines = (tmp_path / "agents-0.log").read_text().splitlines()
    for log in logs:
        mine = [line.partition("  ")[2] for line in lines if line.startswith(f"{log.key}  ")]
        assert mine == [f"line {number} of {log.key}" for number in range(200)]


def test_where_nothing_can_be_written_episodes_go_on(tmp_path):
    (tmp_path / "file").write_text("")
    log = EpisodeLog("0/0/0", EpisodeOutput(tmp_path / "file" / "agents-0.log"))
    log.write("lost\n")
    assert (tmp_path / "file").read_text() == ""  # what is no folder stays as it is
    (tmp_path / "file").unlink()
    log.write("kept once there is a folder\n")
    assert (tmp_path / "file" / "agents-0.log").read_text() == "0/0/0  kept once there is a folder\n"


def test_what_is_printed_outside_of_episodes_goes_where_it_went_before(monkeypatch):
    class Silent(io.StringIO):
        """Says no number of characters, as the streams of Ray's workers."""

        def write(self, text):
            super().write(text)

    stream = Silent()
    monkeypatch.setattr(sys, "stdout", stream)
    with captured(False, lambda: None):
        print("of no episode")
        assert sys.stdout.write("more") == 4
    assert stream.getvalue() == "of no episode\nmore"
