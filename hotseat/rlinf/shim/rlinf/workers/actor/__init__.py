"""RLinf's workers of the actor. Those of other losses are refused by name."""

import sys
from importlib.abc import MetaPathFinder

_OTHERS = {
    "fsdp_sac_policy_worker": "embodied_sac",
    "fsdp_rlt_ac_policy_worker": "rlt_ac",
    "fsdp_rlt_td3_policy_worker": "rlt_td3",
    "fsdp_dagger_policy_worker": "embodied_dagger",
    "fsdp_nft_policy_worker": "embodied_nft",
}
_PIPELINE = "fsdp_actor_worker_pipeline"


class _Refusal(MetaPathFinder):
    """Says why a worker of RLinf is not here when it is imported."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        package, _, name = fullname.rpartition(".")
        if package != __name__:
            return
        if name in _OTHERS:
            raise ImportError(
                f"algorithm.loss_type: {_OTHERS[name]} is not supported: actor and actor_critic are", name=fullname
            )
        if name == _PIPELINE:
            raise ImportError(
                "runner.use_training_pipeline is not supported: rollouts end before the update; set it to False",
                name=fullname,
            )


sys.meta_path.insert(0, _Refusal())
