"""RLinf's workers of rollouts by transformers."""
