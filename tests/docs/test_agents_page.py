"""docs/agents.md shows the examples as they are."""

import ast
import re
from pathlib import Path

from hotseat.openrlhf.agents.agent_turns import FEEDBACK, WHOLE_TEXTS

ROOT = Path(__file__).parents[2]
SHOWN = ("guess_number.py", "guess_with_openai.py")
PAGE = (ROOT / "docs" / "agents.md").read_text()


def test_the_page_shows_the_examples():
    shown = re.findall(r"```python[^\n]*\n(.*?)```", PAGE, re.DOTALL)
    examples = [ast.parse((ROOT / "examples" / "agents" / name).read_text()) for name in SHOWN]
    for example in examples:
        del example.body[0]  # its docstring
    assert [ast.dump(ast.parse(text)) for text in shown] == [ast.dump(example) for example in examples]


def test_the_page_names_every_key_of_a_steps_dict():
    assert all(f"`{key}`" in PAGE for key in (FEEDBACK, *WHOLE_TEXTS, "rewards", "done", "scores", "extra_logs"))
