"""Sources of models. Transformers is imported where it is used: settings with a source need no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint, and how its files are loaded. name: its folder, or its name on the hub."""

    name: str
    trust_remote_code: bool = False  # run Python files that come with it

    def __str__(self) -> str:
        return self.name

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of transformers' `from_pretrained` and `from_config`, besides the name."""
        return {"trust_remote_code": self.trust_remote_code}

    def config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.name, **self.arguments)

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.name, **self.arguments)
