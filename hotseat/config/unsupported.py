"""Options of other frameworks that a config may name and this version cannot run."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from hotseat.config.schema import Config

UNSUPPORTED: Mapping[str, str] = {  # key -> what is missing
    "use_modelscope": "ModelScope; fetch the model with `modelscope download`, and give its folder",
}


def unsupported(config: Config) -> list[tuple[str, str]]:
    default = Config()
    return [(key, what) for key, what in UNSUPPORTED.items() if attrgetter(key)(config) != attrgetter(key)(default)]
