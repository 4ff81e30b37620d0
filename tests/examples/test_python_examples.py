"""The scripts and the notebook of examples/python."""

import re
import runpy
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"


@pytest.mark.slow
def test_the_notebook_trains_stops_and_resumes(tmp_path):
    notebook = nbformat.read(EXAMPLES / "grpo.ipynb", as_version=4)
    client = NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    texts = [str(output) for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [text for text in texts if "\x1b" in text]  # no colours of a terminal
    [started] = [cell for cell in notebook.cells if "hotseat.start(" in cell.source]
    [page] = [output["data"]["text/html"] for output in started.outputs if "text/html" in output.get("data", {})]
    assert "<polyline" in page
    assert "<th>reward</th>" in page
    last = notebook.cells[-1].outputs[0]["text"]
    assert int(re.fullmatch(r"(\d+)% right in step \d+\n", last)[1]) >= 80
    assert (tmp_path / "runs" / "words" / "model" / "model.safetensors").is_file()


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
