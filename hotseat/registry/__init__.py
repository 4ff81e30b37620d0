"""Tables of the things that there are several of, one entry each. They need neither torch nor a config."""
