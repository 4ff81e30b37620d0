"""The order of things: puts roles, engines, backends and rewards together and runs them."""
