"""Folders that are models by their files, for tests in which none is loaded."""

import json
import struct
from pathlib import Path

NO_WEIGHTS = struct.pack("<Q", 2) + b"{}"  # a safetensors file without a tensor


def make_shell(folder: Path, **config: object) -> None:
    """Make a folder with a config.json of these values, and a safetensors file that holds no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(NO_WEIGHTS)
