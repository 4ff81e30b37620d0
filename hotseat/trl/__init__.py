"""Compatibility with TRL: its config objects, and PEFT's of adapters, become a checked config.

Neither TRL nor PEFT is imported: their objects are recognised by class name and module. The core imports nothing from
here; `hotseat.from_trl` does at its first use.
"""
