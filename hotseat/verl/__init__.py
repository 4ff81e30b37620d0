"""Compatibility with verl: its command line, its data, and its reward functions.

The core imports nothing from here; `hotseat.extensions` has the names by which it finds what it needs. The module that
users type, `hotseat.cli.main_ppo`, calls this folder.
"""
