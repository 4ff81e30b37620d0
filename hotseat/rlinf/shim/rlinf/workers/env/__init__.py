"""RLinf's workers of simulators."""
