"""Makes the settings of each worker from the config. Workers never see the config."""
