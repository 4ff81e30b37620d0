"""RLinf's runners, as far as they are here."""
