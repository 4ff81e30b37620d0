"""Files that run code when they are unpickled, for tests of what never unpickles them."""

import os
from pathlib import Path
from typing import Any


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)
