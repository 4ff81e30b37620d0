"""`python -m hotseat` is the `hotseat` command."""

from hotseat.cli.main import entry

entry()
