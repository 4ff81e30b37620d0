"""Who may use the devices, and how much memory is in use there."""
