"""RLinf's workers, as far as they are here."""
