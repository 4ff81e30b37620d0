"""What a run leaves on disk, and what watches over its processes."""
