"""OpenRLHF's commands: the modules of `hotseat.cli`."""

import hotseat.cli

__path__ = list(hotseat.cli.__path__)
