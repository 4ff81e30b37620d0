"""The page of a run in a notebook. tests/examples executes a notebook as a whole."""

from hotseat.script.notebook import NotebookView, in_notebook


def test_the_page_has_curves_the_last_steps_and_the_last_lines():
    view = NotebookView("rl")
    view.expect(20, {"reward": "reward {:.3f}", "samples_failed": "{}"})
    assert "<b>rl</b> step 0 of 20" in view.html()
    assert "<table>" not in view.html()
    for step in range(12):
        view.say(f"line <{step}>")
        view.step(step, {"reward": step / 4, "eval/accuracy": 0.5 if step % 4 == 0 else None, "loss": float("nan")})
    page = view.html()
    assert page.count("<polyline") == 2
    assert "eval/accuracy: 0.5 (from 0.5 to 0.5)" in page
    assert "reward: 2.75 (from 0 to 2.75)" in page
    assert "<tr><td>4</td><td>1</td></tr>" in page
    assert "<td>3</td>" not in page  # the table has the last eight
    assert "line &lt;11&gt;" in page
    assert "line &lt;4&gt;" not in page


def test_a_process_that_is_no_kernel_is_no_notebook():
    assert not in_notebook()
