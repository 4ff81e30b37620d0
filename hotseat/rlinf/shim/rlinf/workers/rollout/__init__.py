"""RLinf's workers of rollouts."""
