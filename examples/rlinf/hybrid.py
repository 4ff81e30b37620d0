"""RLinf's hybrid mode with its Python API: python examples/rlinf/hybrid.py MODEL

Environments on devices 0-3 and samplers on 4-7 exchange messages through channels; then an actor on all eight learns
from what came of it. MODEL is the folder of a language model, of which the environments' words are the first tokens.
"""

import sys
from pathlib import Path

from omegaconf import OmegaConf

from hotseat.rlinf import Channel, Cluster, FSDPActor, HybridComponentPlacement, Worker

HERE = Path(__file__).parent


class Env(Worker):
    """Asks for the next number, twice per stage, and rewards the right one."""

    def __init__(self, cfg):
        super().__init__()
        self.stages = cfg.rollout.pipeline_stage_num

    @Worker.timer("interact")
    def interact(self, questions, answers, trajectories):
        total = 0.0
        with self.device_lock:
            for stage in range(self.stages):  # all stages are asked before the first answer is waited for
                questions.put((self._rank, stage, 3 + self._rank), key=self._rank)
            for stage in range(self.stages):
                group = answers.get(key=(self._rank, stage))
                rewards = [float(each["input_ids"][-1] == each["input_ids"][0] + 1) for each in group]
                # One item: the actor compares the answers to a question, so they must reach the same rank.
                trajectories.put([{**each, "rewards": reward} for each, reward in zip(group, rewards, strict=True)])
                total += sum(rewards)
        return total


class Rollout(Worker):
    """Answers two ways: with the next number, and with the same one."""

    def __init__(self, cfg):
        super().__init__()
        self.stages = cfg.rollout.pipeline_stage_num

    def generate(self, questions, answers):
        with self.device_lock:
            for _ in range(self.stages):
                env, stage, number = questions.get(key=self._rank)
                both = [
                    {"input_ids": [number, reply], "loss_mask": [False, True], "prev_logprobs": [0.0, -1.0]}
                    for reply in (number + 1, number)
                ]
                answers.put(both, key=(env, stage))

    def receive_weights(self, cfg):
        weights = self.recv(cfg.actor.group_name, 0)
        return len(weights)


def main(cfg):
    cluster = Cluster(cluster_cfg=cfg.cluster, num_devices=8)  # 8 logical devices: this needs no GPU
    component_placement = HybridComponentPlacement(cfg, cluster)

    actor_placement = component_placement.get_strategy("actor")
    actor_group = FSDPActor.create_group(cfg).launch(
        cluster, name=cfg.actor.group_name, placement_strategy=actor_placement
    )
    env_group = Env.create_group(cfg).launch(
        cluster, name=cfg.env.group_name, placement_strategy=component_placement.get_strategy("env")
    )
    rollout_group = Rollout.create_group(cfg).launch(
        cluster, name=cfg.rollout.group_name, placement_strategy=component_placement.get_strategy("rollout")
    )
    questions, answers, trajectories = (Channel.create(name) for name in ("Env", "Rollout", "Actor"))

    actor_group.init_worker().wait()
    metrics = []
    for step in range(2):
        actor_group.set_global_step(step).wait()
        env_handle = env_group.interact(questions, answers, trajectories)
        rollout_handle = rollout_group.generate(questions, answers)
        rollout_handle.wait()
        rewards = sum(env_handle.wait())
        trained = actor_group.run_training(trajectories)
        metrics.append({"rewards": rewards, **trained.wait()[0], "seconds": trained.consume_duration()})
        print(metrics[-1])
    sent = actor_group.sync_model_to_rollout()
    received = rollout_group.execute_on(0).receive_weights(cfg).wait()
    return component_placement.placement_mode, metrics, sent.wait()[0], received[0]


if __name__ == "__main__":
    config = OmegaConf.load(HERE / "hybrid.yaml")
    config.actor.model.model_path = sys.argv[1]
    result = main(config)
