"""OpenRLHF's commands: the modules of `hotseat.cli`, and those here, which say what to use instead."""

import hotseat.cli

__path__ = [*hotseat.cli.__path__, *__path__]
