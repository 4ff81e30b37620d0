"""docs/agents.md shows the example as it is."""

import ast
import re
from pathlib import Path

from hotseat.agents._openrlhf import FEEDBACK, WHOLE_TEXTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "agents.md").read_text()


def test_the_page_shows_the_example():
    [shown] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    example = ast.parse((ROOT / "examples" / "agents" / "guess_number.py").read_text())
    del example.body[0]  # its docstring
    assert ast.dump(ast.parse(shown)) == ast.dump(example)


def test_the_page_names_every_key_of_a_steps_dict():
    assert all(f"`{key}`" in PAGE for key in (FEEDBACK, *WHOLE_TEXTS, "rewards", "done", "scores", "extra_logs"))
