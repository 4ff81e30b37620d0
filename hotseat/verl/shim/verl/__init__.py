"""verl's package, for `python -m verl.trainer.main_ppo` on Hotseat."""

from hotseat.verl.shim import SHIM

SHIM.refuse_another()
