"""`python -m hotseat` is the `hotseat` command."""

from hotseat.cli.command import entry

entry()
