"""RLinf's checks of a config."""

from hotseat.rlinf.embodied import validate_cfg as validate_cfg
