import inspect
from dataclasses import dataclass
from types import FrameType

from hotseat.agents.user_lines import line_of


@dataclass
class Noted:
    """A class whose `__init__` Python writes: its code is in no file."""

    seen: list

    def __post_init__(self):
        frame: FrameType | None = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename != "<string>":
            frame = frame.f_back
        self.seen.append(line_of(frame))


def test_the_line_is_of_a_file_of_the_users():
    seen: list[str | None] = []
    Noted(seen)
    assert seen[0] is not None
    assert seen[0].startswith(f"{__file__}:")
