"""The scripts and the notebook of examples/python."""

import re
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import preloaded
import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from nbclient import NotebookClient
from traitlets.config import Config

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"


class Notebook(InteractiveShell):
    """IPython in this process, as a kernel has it: its outputs are kept, and nothing is written to its history."""

    kernel = "of this process"

    def __init__(self, **options: Any):
        options["config"] = Config({"HistoryManager": {"enabled": False}, "InteractiveShell": {"colors": "nocolor"}})
        super().__init__(display_pub_class=CapturingDisplayPublisher, **options)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda command, check: preloaded.run(command))
    shell = Notebook.instance()
    yield shell
    shell.restore_sys_module_state()
    Notebook.clear_instance()


def assert_is_page_of_run(page: str) -> None:
    assert "<polyline" in page
    assert "<th>reward</th>" in page


def assert_has_learned(last_words: str, directory: Path) -> None:
    assert int(re.fullmatch(r"(\d+)% right in step \d+\n", last_words)[1]) >= 80
    assert (directory / "runs" / "words" / "model" / "model.safetensors").is_file()


@pytest.mark.long
@pytest.mark.slow
def test_the_cells_of_the_notebook_train_stop_and_resume(shell, tmp_path, capsys):
    words, pages = "", shell.display_pub.outputs
    for cell in nbformat.read(EXAMPLES / "grpo.ipynb", as_version=4).cells:
        if cell.cell_type == "code":
            shell.run_cell(cell.source).raise_error()
            words = capsys.readouterr().out
            assert "\x1b" not in words  # no colours of a terminal
        if "hotseat.start(" in cell.source:
            started = pages[0]["transient"]
    assert [page["transient"] for page in pages if not page["update"]] == [started, pages[-1]["transient"]]
    assert not [page for page in pages if "\x1b" in str(page)]
    assert_is_page_of_run([page for page in pages if page["transient"] == started][-1]["data"]["text/html"])
    assert_has_learned(words, tmp_path)


@pytest.mark.long
def test_the_notebook_trains_stops_and_resumes_in_a_kernel_of_jupyter(tmp_path):
    notebook = nbformat.read(EXAMPLES / "grpo.ipynb", as_version=4)
    client = NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    texts = [str(output) for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [text for text in texts if "\x1b" in text]  # no colours of a terminal
    [started] = [cell for cell in notebook.cells if "hotseat.start(" in cell.source]
    [page] = [output["data"]["text/html"] for output in started.outputs if "text/html" in output.get("data", {})]
    assert_is_page_of_run(page)
    assert_has_learned(notebook.cells[-1].outputs[0]["text"], tmp_path)


@pytest.mark.long
def test_two_rewards_in_a_script(tmp_path, monkeypatch, capfd):
    from hotseat.cli.main import main

    monkeypatch.chdir(tmp_path)
    assert main(["new", "rl", "first"]) == 0
    names = runpy.run_path(str(EXAMPLES / "grpo_two_rewards.py"), run_name="__main__")
    rewards = list(names["run"].frame()["reward"])
    assert rewards[-1] > rewards[1] + 0.5
    assert names["run"].metrics()[-1]["extra/is_right"] >= 0.9


@pytest.mark.long
@pytest.mark.parametrize("script", ["sft_then_dpo.py", "tool_agent.py"])
def test_the_other_scripts(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    metrics = names["run" if "run" in names else "dpo"].metrics()[-1]
    assert metrics.get("eval/accuracy", metrics.get("reward")) >= 0.85
