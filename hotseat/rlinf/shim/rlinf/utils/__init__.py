"""RLinf's helpers, as far as they are here."""
