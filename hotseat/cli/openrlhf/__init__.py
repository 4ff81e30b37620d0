"""OpenRLHF's command lines, translated into our config.

flags      every flag: its values, its default, the config fields it sets
argv       the parser: splits a command line into flags and values
derive     config fields that depend on several flags: placement, overlap, rewards, lengths
translate  the whole translation: a checked `Config`, and flags without effect, missing flags, unbuilt features
run        the commands: print the config or start the run
help       the text of `--help`: an example, and every flag in groups
table      the table of all flags in the documentation, rendered from the above
shim       a package `openrlhf` for PYTHONPATH, whose commands are ours
"""
