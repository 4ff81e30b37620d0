"""Compatibility with TRL: its config objects, and PEFT's of adapters, become a checked config.

Neither TRL nor PEFT is imported: their objects are recognised by class name and module. The core imports nothing from
here; `hotseat.from_trl` does at its first use.

fields     every field of TRL's configs: its default, the keys that it sets, or why there is none
derive     keys that depend on several fields: batches, loss, engine, precision, data
lora       PEFT's LoraConfig
translate  `from_trl`: a checked `Config`, and what differs
table      the tables of all fields in the documentation, rendered from the above
"""
