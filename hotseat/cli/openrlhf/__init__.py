"""OpenRLHF's command lines: its flags in, our config out.

flags      what there is: every flag, its values, its default, the config fields it sets
argv       what was given: a command line taken apart
derive     what flags mean together: placement, overlap, rewards, lengths
translate  all of it: a checked `Config`, and what had no effect, is missing or is not built
run        the commands: print the config or start the run
help       the text of `--help`: an example, and every flag in groups
table      the documentation of all flags, rendered from the above
"""
