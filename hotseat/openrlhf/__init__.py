"""Compatibility with OpenRLHF: its command lines, agent files, reward files and names of metrics.

The core imports nothing from here; `hotseat.extensions` has the names by which it finds what it needs. The modules that
users type, such as `hotseat.cli.train_sft`, call this folder.
"""
