"""Commands that are interrupted."""

import argparse
import signal

import pytest

from hotseat.cli import main as command
from hotseat.cli.ending import interrupted_by_sigterm, last_words


def test_sigterm_interrupts_a_command_from_its_first_moment_and_leaves_no_handler():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interrupted_by_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_command_without_a_run_says_so(monkeypatch, capsys):
    def run(arguments):
        signal.raise_signal(signal.SIGTERM)  # as if while libraries load

    monkeypatch.setattr(command, "parse", lambda argv: argparse.Namespace(run=run))
    assert command.main(["run"]) == 130
    assert capsys.readouterr().err == "hotseat: stopped\nno run had begun: start it again with the same command\n"


def test_what_a_run_says_of_itself_is_passed_on():
    interrupt = KeyboardInterrupt()
    interrupt.add_note("nothing is lost")
    assert last_words("train_sft", interrupt) == "train_sft: stopped\nnothing is lost"
