"""Commands that are interrupted."""

import argparse
import contextlib
import signal
import subprocess
import sys
import threading

import pytest

from hotseat import interrupts
from hotseat.cli import main as command
from hotseat.cli.ending import last_words

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def hears_interrupts():
    """Hear SIGINT: what a shell starts in its background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_interrupts_from_the_first_moment_and_leaves_no_handler(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), interrupts.handled():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_an_error_that_a_library_makes_of_an_interrupt_is_one():
    """As torch does while it saves, and modules while they load."""

    def load():
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt as interrupt:
            raise ImportError("partially loaded") from interrupt

    with pytest.raises(KeyboardInterrupt) as caught, interrupts.handled():
        load()
    assert isinstance(caught.value.__cause__, ImportError)


def test_an_interrupt_that_a_library_drops_is_raised_again():

    def drop():
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt), interrupts.handled():
        drop()


def test_an_interrupt_where_nothing_can_be_raised_prints_no_traceback_and_is_raised_later(capfd):
    class Interrupted:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    def drop():
        Interrupted()

    with pytest.raises(KeyboardInterrupt), interrupts.handled():
        drop()
    assert capfd.readouterr().err == ""


def test_the_first_signal_waits_for_what_can_be_finished_and_the_second_does_not(capfd):
    finished = iter(["this step is finished and saved"])
    with interrupts.handled() as handler, handler.finishing(lambda: next(finished, None)):
        signal.raise_signal(signal.SIGINT)
        said = "this step is finished and saved, then the run ends; a second one ends it at once"
        assert capfd.readouterr().err == f"hotseat: Ctrl-C: {said}\n"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        handler.is_raised = False


def test_what_a_shell_started_in_its_background_goes_on_ignoring_ctrl_c():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts.handled():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_a_run_in_another_thread_leaves_the_signals_to_the_program():
    handlers = []

    def run():
        with interrupts.handled():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGTERM)]


def test_one_more_signal_ends_a_command_that_is_closing_or_has_ended():
    code = (
        "import signal, sys, time\n"
        "from hotseat import interrupts\n"
        "interrupts.handle_until_exit()\n"
        "try:\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "finally:\n"
        "    signal.raise_signal(signal.SIGINT)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (130, "hotseat: Ctrl-C: ended at once\n")


def test_a_command_without_a_run_says_so(monkeypatch, capsys):
    def run(arguments):
        signal.raise_signal(signal.SIGTERM)  # as if while libraries load

    monkeypatch.setattr(command, "parse", lambda argv: argparse.Namespace(run=run))
    assert command.main(["run"]) == 130
    assert capsys.readouterr().err == "hotseat: stopped\nno run had begun: start it again with the same command\n"


def test_a_command_whose_run_was_closed_already_tells_what_became_of_it(monkeypatch, capsys):
    def run(arguments):
        interrupts.current().describe = lambda: "nothing is lost"
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(command, "parse", lambda argv: argparse.Namespace(run=run))
    assert command.main(["run"]) == 130
    assert capsys.readouterr().err == "hotseat: stopped\nnothing is lost\n"


def test_what_a_run_says_of_itself_is_passed_on():
    interrupt = KeyboardInterrupt()
    interrupt.add_note("nothing is lost")
    assert last_words("train_sft", interrupt) == "train_sft: stopped\nnothing is lost"
