"""Lines that worker processes write for the user, and the driver shows."""

import threading

from hotseat.loop.workers.notes import note_writer, notes_shown

WAIT_S = 300.0


def test_a_line_is_shown_while_the_context_lasts_and_earlier_ones_are_not(tmp_path):
    path, shown, is_shown = tmp_path / "notes.txt", [], threading.Event()

    def show(line: str) -> None:
        shown.append(line)
        is_shown.set()

    write = note_writer(str(path))
    write("of an earlier run")
    with notes_shown(path, show):
        write("first: é")
        assert is_shown.wait(WAIT_S)
        write("second\nin two lines")
    assert shown == ["first: é", "second\nin two lines"]  # what is left at the end is shown, too


def test_a_file_that_cannot_be_written_is_replaced_by_stderr(tmp_path, capsys):
    note_writer(str(tmp_path / "absent" / "notes.txt"))("a line")
    note_writer(None)("another")
    target = tmp_path / "elsewhere"
    target.write_text("")
    (tmp_path / "link").symlink_to(target)
    note_writer(str(tmp_path / "link"))("a third")
    assert target.read_text() == ""
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith("a line (")
    assert first.endswith("notes.txt: No such file or directory)")
    assert (second, third.split()[:2]) == ("another", ["a", "third"])
