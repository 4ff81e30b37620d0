"""What is read and checked before a run starts."""
