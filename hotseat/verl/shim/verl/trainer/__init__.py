"""verl's trainers: `main_ppo` is `hotseat.cli.main_ppo`."""
