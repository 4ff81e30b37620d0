"""Options that can have no effect, values that contradict each other, and what a run cannot start without."""

import pytest
import yaml

from hotseat.config import conditions, loads, roles_of
from hotseat.config.conflicts import missing
from hotseat.config.load import valid_keys
from hotseat.config.resolved import reward_parts
from hotseat.config.schema import conditions_of
from hotseat.errors import ConfigError

# A config in which the option has no effect, and a word of the reason.
WITHOUT_EFFECT = {
    "cluster.profile": ("task: dpo\ncluster: {profile: p.json}", "task is dpo; this is for rl"),
    "components": ("task: sft\ncomponents: {filter: {path: 'a:B'}}", "task is sft; this is for rl"),
    "env.films": ("env: {path: babyai, images: true, films: 2}", "have films of what the policy saw"),
    "critic.value_clip": ("critic: {value_clip: 0.1}", "no critic"),
    "checkpoint.export_critic": ("checkpoint: {export_critic: true}", "no critic"),
    "reference.model": ("reference: {model: m}", "algorithm.kl.coef is 0"),
    "algorithm.kl.estimator": ("algorithm: {kl: {estimator: k3}}", "algorithm.kl.coef is 0"),
    "algorithm.kl.allow_k1_loss": ("algorithm: {kl: {coef: 0.1, allow_k1_loss: true}}", "is not k1, or"),
    "algorithm.kl.horizon": ("algorithm: {kl: {coef: 0.1, horizon: 5}}", "does not adapt"),
    "reward.normalize": ("reward: {function: r.py, normalize: true}", "do not come from a model"),
    "reward.retries": ("reward: {model: m, retries: 1}", "neither from reward.function"),
    "algorithm.gamma": ("algorithm: {gamma: 0.9}", "does not discount"),
    "algorithm.gae_lambda": ("algorithm: {gae_lambda: 0.9}", "not gae"),
    "algorithm.std_norm": ("algorithm: {estimator: rloo, std_norm: false}", "does not divide"),
    "algorithm.batch_norm": ("task: sft\nalgorithm: {batch_norm: true}", "task is sft; this is for rl"),
    "algorithm.correction.low": ("algorithm: {correction: {low: 0.1}}", "kind is none"),
    "algorithm.correction.high": (
        "algorithm: {policy_loss: gspo, correction: {kind: rollout-ratio, high: 2}}",
        "clip_low and clip_high bound",
    ),
    "algorithm.correction.normalise": (
        "algorithm: {policy_loss: gspo, correction: {kind: rollout-ratio, normalise: true}}",
        "has no weights",
    ),
    "algorithm.correction.reject_high": ("algorithm: {correction: {reject_high: 2}}", "no answer is dropped"),
    "algorithm.correction.reject_low": (
        "algorithm: {correction: {reject: k3, reject_high: 2, reject_low: 0.5}}",
        "no lower bound",
    ),
    "algorithm.dual_clip": (
        "algorithm: {policy_loss: cispo, dual_clip: 3}",
        "policy_loss is cispo; this is for ppo and gspo",
    ),
    "algorithm.filtering.high": ("algorithm: {filtering: {high: 0.9}}", "enabled is false"),
    "reward.overlong.penalty_factor": ("reward: {overlong: {penalty_factor: 2}}", "buffer_length is 0"),
    "train.deepspeed.zpg": ("train: {deepspeed: {zpg: 8}}", "train.backend is fsdp"),
    "train.lora.alpha": ("train: {lora: {alpha: 8}}", "train.lora.rank is 0"),
    "train.load_in_4bit": ("train: {load_in_4bit: true}", "all weights are trained, and none are in 4 bits"),
    "train.ema.beta": ("train: {ema: {beta: 0.9}}", "enabled is false"),
    "train.micro_batch_size": ("train: {micro_batch_size: 2, max_tokens_per_device: 4096}", "sets the size"),
    "train.chosen_tokens_per_device": ("train: {micro_batch_size: 2, chosen_tokens_per_device: 64}", "sets the size"),
    "rollout.chosen_tokens_per_device": ("rollout: {micro_batch_size: 2, chosen_tokens_per_device: 64}", "sets the"),
    "rollout.micro_batch_size": ("rollout: {micro_batch_size: 2, max_tokens_per_device: 4096}", "sets the size"),
    "train.fp32_master": ("train: {dtype: fp32, fp32_master: true}", "their own masters"),
    "rollout.memory_share": ("rollout: {memory_share: 0.5}", "this is for vllm"),
    "rollout.weight_transport": ("rollout: {weight_transport: nccl}", "on the actor's devices"),
    "actor.optimizer.muon.momentum": ("actor: {optimizer: {muon: {momentum: 0.9}}}", "kind is adamw"),
    "actor.optimizer.min_learning_rate_ratio": (
        "actor: {optimizer: {schedule: constant, min_learning_rate_ratio: 0.5}}",
        "schedule is constant",
    ),
    "critic.optimizer.muon.momentum": (
        "algorithm: {estimator: gae}\ncritic: {optimizer: {muon: {momentum: 0.9}}}",
        "kind is adamw",
    ),
    "critic.optimizer.min_learning_rate_ratio": (
        "algorithm: {estimator: gae}\ncritic: {optimizer: {schedule: constant, min_learning_rate_ratio: 0.5}}",
        "schedule is constant",
    ),
    "rollout.fp32_head": ("train: {dtype: fp32}\nrollout: {fp32_head: false}", "so are all logits"),
    "rollout.max_thinking_tokens": ("agent: {path: a.py}\nrollout: {max_thinking_tokens: 5}", "asks by itself"),
    "rollout.stop": ("env: {path: gym}\nrollout: {stop: END}", "as many tokens as env.chunk"),
    "rollout.num_slots": ("rollout: {engine: vllm, num_slots: 5}", "sizes its own batch"),
    "algorithm.turn_credit": ("algorithm: {turn_credit: own}", "one turn"),
    "agent.turn_length": ("env: {path: gym}\nagent: {turn_length: rest}", "as many tokens as env.chunk"),
    "agent.max_steps": ("agent: {max_steps: 3}", "one turn"),
    "agent.sampling": ("agent: {sampling: refuse}", "no program talks to the policy"),
    "agent.pass_env": ("agent: {path: a.py, pass_env: [A]}", "neither agent.command nor agent.environment nor"),
    "agent.preload": ("agent: {path: a.py, preload: [json]}", "agent.command is not set"),
    "agent.containers": ("agent: {path: a.py, containers: podman}", "agent.command is not set"),
    "agent.environment.name": ("agent: {environment: {name: a}}", "agent.environment.family is not set"),
    "agent.environment.num_processes": (
        "agent: {path: a.py, environment: {num_processes: 2}}",
        "neither agent.environment.family nor agent.python is set",
    ),
    "agent.python": ("agent: {command: [a], python: python3}", "it runs an agent.environment, or the function play"),
    "overlap.queue": ("overlap: {queue: 1}", "a rollout ends before"),
    "overlap.order": ("overlap: {order: arrival}", "a rollout ends before"),
    "overlap.in_flight": ("overlap: {in_flight: recompute}", "a rollout ends before"),
    "data.input_template": ("data: {input_template: 'Q {}', apply_chat_template: true}", "renders the prompt"),
    "data.chat_template": ("data: {chat_template: x}", "apply_chat_template is false"),
    "data.chat_template_kwargs": ("data: {chat_template_kwargs: {enable_thinking: false}}", "apply_chat_template is"),
    "data.split": ("data: {split: train}", "data.path is not set"),
    "data.max_images_per_prompt": ("data: {max_images_per_prompt: 1}", "image_key"),
    "train.freeze_visual_encoder": ("train: {freeze_visual_encoder: true}", "neither is env.images"),
    "eval.every": ("eval: {every: 5}", "nothing is evaluated"),
    "checkpoint.keep_last": ("checkpoint: {every_minutes: 0, keep_last: 2}", "no checkpoint is made"),
    "checkpoint.background": ("checkpoint: {every_minutes: 0, background: true}", "no checkpoint is made"),
    "checkpoint.allow_changes": ("checkpoint: {allow_changes: [seed]}", "the run starts anew"),
    "checkpoint.push_private": ("checkpoint: {push_private: false}", "push_to_hub is not set, so nothing is pushed"),
    "checkpoint.best_metric": ("checkpoint: {best_metric: x}", "eval.path is not set"),
    "log.wandb.project": ("log: {wandb: {project: p}}", "enabled is false"),
    "reward.judge.model": ("reward: {judge: {model: big}}", "reward.judge.rubric is not set"),
    "reward.judge.combine": (
        "reward: {judge: {rubric: r.txt, url: 'http://127.0.0.1:8000/v1', model: big, combine: median}}",
        "reward.judge.votes is 1",
    ),
    "reward.judge.engine.kind": (
        "reward: {judge: {rubric: r.txt, url: 'http://127.0.0.1:8000/v1', model: big, engine: {kind: vllm}}}",
        "the judge runs elsewhere",
    ),
    "reward.judge.retries": (
        "reward: {judge: {rubric: r.txt, model: big, retries: 2}}",
        "on an engine of the run's own",
    ),
    "reward.judge.engine.enforce_eager": (
        "reward: {judge: {rubric: r.txt, model: big, engine: {enforce_eager: true}}}",
        "this is for vllm",
    ),
    "reward.judge.engine.num_slots": (
        "reward: {judge: {rubric: r.txt, model: big, engine: {kind: vllm, num_slots: 4}}}",
        "vllm, which sizes its own batch",
    ),
    "log.mlflow.uri": ("log: {mlflow: {uri: 'http://there'}}", "enabled is false"),
    "log.trackio.space": ("log: {trackio: {space: me/mine}}", "enabled is false"),
    "reward.trial_timeout_s": (
        "reward: {url: 'http://u', trial_timeout_s: 2}",
        "rewards do not come from reward.function",
    ),
    "reward.max_open_requests": ("reward: {function: r.py, max_open_requests: 2}", "do not come from reward.url"),
    "reward.max_memory_gib": (
        "reward: {url: 'http://u', max_memory_gib: 2}",
        "rewards come neither from reward.function nor from reward.graders",
    ),
    "reward.sandbox.max_cpu_s": (
        "reward: {function: f.py, sandbox: {max_cpu_s: 2}}",
        "no grader of reward.graders runs code",
    ),
    "env.enable_offload": ("env: {enable_offload: true}", "places no env"),
    "rollout.pipeline_stage_num": ("rollout: {pipeline_stage_num: 2}", "no simulator is stepped"),
    "rollout.num_hosts": ("env: {path: gym}\nrollout: {num_hosts: 2}", "process of the role env is a rollout host"),
    "data.path": ("env: {path: gym}\ndata: {path: p.jsonl}", "tasks and seeds are the prompts"),
    "rollout.max_new_tokens": ("env: {path: gym}\nrollout: {max_new_tokens: 4}", "as many tokens as env.chunk"),
    "inference.enable_offload": ("inference: {enable_offload: true}", "places no inference"),
    "rollout.temperature": ("task: sft\nrollout: {temperature: 1}", "this is for rl"),
    "algorithm.dpo.beta": ("algorithm: {dpo: {beta: 1}}", "this is for dpo"),
    "algorithm.dpo.label_smoothing": (
        "task: dpo\nalgorithm: {dpo: {loss: ipo, label_smoothing: 0.1}}",
        "algorithm.dpo.loss is ipo; this is for dpo",
    ),
    "algorithm.dpo.length_normalised": (
        "task: dpo\nalgorithm: {dpo: {length_normalised: true}}",
        "algorithm.dpo.loss is dpo; this is for ipo",
    ),
    "algorithm.dpo.gamma": ("task: dpo\nalgorithm: {dpo: {gamma: 1}}", "this is for simpo"),
    "algorithm.dpo.nll_coef": (
        "task: dpo\nalgorithm: {dpo: {loss: orpo, nll_coef: 1}}",
        "algorithm.dpo.loss is orpo; this is for dpo and ipo and simpo",
    ),
    "algorithm.dpo.precompute": (
        "task: dpo\nalgorithm: {dpo: {loss: simpo, precompute: true}}",
        "algorithm.dpo.loss simpo has no reference",
    ),
    "algorithm.reward_modelling.loss": ("algorithm: {reward_modelling: {loss: logexp}}", "this is for rm"),
    "data.output_key": ("data: {output_key: x}", "this is for sft"),
    "data.chosen_key": ("data: {chosen_key: x}", "this is for rm or dpo"),
    "data.label_key": ("task: sft\ndata: {label_key: x}", "this is for rl"),
    "data.input_key": ("task: rm\ndata: {input_key: x}", "this is for rl or sft"),
    "eval.temperature": ("task: sft\neval: {path: e, temperature: 1}", "this is for rl"),
    "eval.reward": ("eval: {reward: r.py}", "eval.path is not set"),
    "reference.enable_offload": ("task: sft\nreference: {enable_offload: true}", "task is sft; this is for rl or dpo"),
    "reference.teachers": ("task: dpo\nreference: {teachers: {a: m}}", "task is dpo; this is for rl"),
    "data.max_samples": ("env: {path: gym}\ndata: {max_samples: 4}", "tasks and seeds are the prompts"),
    "eval.graders": (
        "env: {path: gym, eval_seeds: 1}\neval: {graders: [{kind: exact}]}",
        "the simulator gives the rewards",
    ),
    "agent.tool_timeout_s": ("agent: {tool_timeout_s: 5}", "one turn"),
    "agent.history": ("env: {path: gym}\nagent: {history: render}", "no program talks to the policy"),
    "log.samples_every": ("log: {samples_per_step: 0, samples_every: 2}", "no sample is recorded"),
    "log.keep_rollouts": ("task: rm\nlog: {keep_rollouts: true}", "task is rm; this is for rl"),
    "train.on_spike": ("task: sft\ntrain: {on_spike: stop}", "task is sft; this is for rl"),
    "data.prompt_max_length": ("task: sft\ndata: {prompt_max_length: 9}", "task is sft; this is for rl"),
}


@pytest.mark.parametrize("key", WITHOUT_EFFECT)
def test_an_option_that_can_have_no_effect_is_an_error(key):
    text, reason = WITHOUT_EFFECT[key]
    with pytest.raises(ConfigError) as caught:
        loads(text)
    assert [problem.key for problem in caught.value.problems] == [key]
    assert reason in caught.value.problems[0].message
    assert caught.value.problems[0].message.endswith("remove it")


@pytest.mark.parametrize(
    ("text", "key", "reason"),
    [
        ("algorithm: {dpo: {loss: orpo}}\nreference: {model: m}", "model", "algorithm.dpo.loss orpo has no reference"),
        (
            "train: {lora: {rank: 4}}\nreference: {enable_offload: true}",
            "enable_offload",
            "the model without adapters is the reference",
        ),
        (
            "algorithm: {dpo: {precompute: true}}\nreference: {enable_offload: true}",
            "enable_offload",
            "the reference is needed only before training",
        ),
    ],
)
def test_a_reference_that_preferences_do_not_use(text, key, reason):
    with pytest.raises(ConfigError) as caught:
        loads(f"task: dpo\n{text}")
    assert [problem.key for problem in caught.value.problems] == [f"reference.{key}"]
    assert reason in caught.value.problems[0].message


def test_every_condition_is_used():
    used = {id(condition) for key in valid_keys() for _, condition in conditions_of(key)}
    kinds = (conditions.Condition, conditions.Beside)
    table = {name: each for name, each in vars(conditions).items() if isinstance(each, kinds)}
    assert [name for name, condition in table.items() if id(condition) not in used] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "algorithm: {correction: {kind: tis, low: 3, high: 2}}",
            "3.0 is not below high, 2.0: a ratio of probabilities is kept between them, usually 0.5 and 5",
        ),
        ("algorithm: {correction: {kind: icepop, low: 2, high: 2}}", "2.0 is not below high, 2.0"),
        (
            "algorithm: {policy_loss: gspo, correction: {kind: tis}}",
            "tis weighs tokens, and algorithm.policy_loss gspo has one ratio per sequence: set rollout-ratio",
        ),
        (
            "algorithm: {correction: {kind: rollout-ratio}}",
            "rollout-ratio is the correction of algorithm.policy_loss gspo and gmpo, and it is ppo: set tis or icepop",
        ),
        ("algorithm: {policy_loss: cispo, correction: {kind: rollout-ratio}}", "gmpo, and it is cispo: set tis"),
        (
            "train: {full_determinism: true}\noverlap: {staleness: 1}",
            "train.full_determinism: overlap.staleness is 1: which weights sample which answer depends on time",
        ),
        (
            "train: {dtype: fp32}\nrollout: {engine: vllm, quantization: fp8}",
            "rollout.quantization: fp8 is for 16-bit models, and train.dtype is fp32: set that to bf16",
        ),
        (
            "train: {dtype: fp32}\nrollout: {engine: vllm, kv_cache_dtype: fp8}",
            "rollout.kv_cache_dtype: fp8 is for 16-bit models, and train.dtype is fp32",
        ),
        (
            "train: {lora: {rank: 4}}\nrollout: {engine: vllm, quantization: fp8, lora_sync: adapter}",
            "rollout.quantization: fp8 has not been tried with adapters that vLLM applies itself: set",
        ),
        (
            "train: {load_in_4bit: true, lora: {rank: 4}}\nrollout: {engine: vllm, lora_sync: merged}",
            "rollout.lora_sync: merged, and nothing can be merged into 4 bits (train.load_in_4bit): unset it, or set",
        ),
        (
            "train: {load_in_4bit: true, lora: {rank: 4}}\nrollout: {engine: vllm, quantization: fp8}",
            "rollout.quantization: engines have the weights that are frozen in NF4 (train.load_in_4bit): unset one",
        ),
        (
            "train: {load_in_4bit: true, lora: {rank: 4}}\ncluster: {component_placement: {actor: 0, inference: 1}}",
            "train.load_in_4bit: a copy of the policy (the role inference) gets merged weights: do not place it",
        ),
        (
            "train: {load_in_4bit: true, lora: {rank: 4}, backend: deepspeed, deepspeed: {deepcompile: true}}",
            "train.deepspeed.deepcompile: has not been tried with weights of 4 bits (train.load_in_4bit): unset one",
        ),
        (
            "train: {load_in_4bit: true, lora: {rank: 4}, backend: deepspeed, deepspeed: {tensor_parallel_size: 2}}",
            "train.deepspeed.tensor_parallel_size: has not been tried with weights of 4 bits (train.load_in_4bit)",
        ),
        (
            "train: {full_determinism: true}\nrollout: {engine: vllm, quantization: fp8}",
            "rollout.quantization: fp8 has not been tried with train.full_determinism, for which vLLM, depending",
        ),
        (
            "train: {attention: sdpa}",
            "train.attention: sdpa does not keep packed sequences apart: set train.packing to false",
        ),
        (
            "data: {sampler: 's.py:f'}\noverlap: {staleness: 1}",
            "that a sampler gets would depend on which answers arrive",
        ),
        ("algorithm: {correction: {reject: k1}}", "has to be set with reject k1: 2 keeps geometric means between"),
        ("algorithm: {correction: {reject: k3}}", "has to be set with reject k3: 0.1 is loose, 0.01 strict"),
        ("algorithm: {correction: {reject: k1, reject_high: 0.5}}", "keep those from 2 to 0.5: set reject_low below 1"),
        ("algorithm: {correction: {reject: k1, reject_low: 2, reject_high: 3}}", "keep those from 2 to 3: set"),
        # 1 / reject_high is 1 too: nothing lies between the bounds.
        ("algorithm: {correction: {reject: k1, reject_high: 1.0}}", "keep those from 1 to 1: set"),
        # Half of the answers on which engine and trainer agree would be dropped for a last bit.
        ("algorithm: {correction: {reject: k1, reject_low: 0.5, reject_high: 1}}", "keep those from 0.5 to 1: set"),
        ("algorithm: {correction: {reject: k1, reject_low: 1, reject_high: 2}}", "keep those from 1 to 2: set"),
        ("train: {ema: {enabled: true, beta: 1.0}}", "train.ema.beta: given 1.0, must be below 1.0"),
        ("actor: {optimizer: {betas: [0.9, 1.0]}}", "actor.optimizer.betas[1]: given 1.0, must be below 1.0"),
        (
            "actor: {optimizer: {kind: muon, muon: {momentum: 1.0}}}",
            "actor.optimizer.muon.momentum: given 1.0, must be below 1.0",
        ),
        (
            "algorithm: {kl: {coef: 0.1, as_loss: true, estimator: k1}}",
            "k1 as a loss regularises nothing: its gradient is zero on average, whatever the reference; set k2 or k3",
        ),
        # 4 x 8 samples a step: 0.2 of them are 6.4, and a horizon of 6 turns 1 - 0.2 x 32 / 6 negative.
        (
            "algorithm: {kl: {coef: 0.1, target: 1, horizon: 6}}\nrollout: {batch_size: 4, samples_per_prompt: 8}",
            "6 is too short for steps of 32 samples: one of them could turn the coefficient negative; set it above 6.4",
        ),
        # Exactly 0.2 of the samples: the coefficient could become 0, and stay there.
        (
            "algorithm: {kl: {coef: 0.1, target: 1, horizon: 8}}\nrollout: {batch_size: 4, samples_per_prompt: 10}",
            "set it above 8",
        ),
        ("agent: {path: a.py, gateway: {bind: 'here:http'}}", "write it as 127.0.0.1 or as 127.0.0.1:8000"),
        ("agent: {path: a.py, gateway: {advertise_url: here}}", "write it as http://gateway.example:8000"),
        (
            "agent: {path: a.py, gateway: {bind: 0.0.0.0, advertise_url: 'http://here'}}\nrollout: {num_hosts: 1}",
            "'0.0.0.0' takes any free port, which agent.gateway.advertise_url cannot name",
        ),
        (
            "agent: {path: a.py, gateway: {bind: '0.0.0.0:8000', advertise_url: 'http://here'}}",
            "each rollout host knows only the episodes of its own: set rollout.num_hosts to 1",
        ),
        (
            "agent: {path: a.py}\nalgorithm: {estimator: reinforce, turn_credit: own}",
            "algorithm.estimator is reinforce: set rloo, reinforce_baseline, group_norm, dr_grpo, or turn_credit to",
        ),
        (
            "actor: {rope_scaling: {rope_type: dynamic, factor: 2}}",
            "rope_type is 'dynamic', must be one of yarn, linear",
        ),
        ("actor: {rope_scaling: {rope_type: yarn}}", "factor is None, must be a number above 1"),
        ("actor: {rope_scaling: {rope_type: llama3, factor: 2}}", "llama3 needs low_freq_factor and high_freq_factor"),
        ("actor: {rope_scaling: {rope_type: linear, factor: 2, mscale: 1}}", "mscale is no parameter of linear"),
        ("actor: {rope_scaling: {rope_type: yarn, factor: 2, beta_fast: x}}", "beta_fast is 'x', must be a number"),
        (
            "actor: {rope_scaling: {rope_type: yarn, factor: 2}}\ndata: {image_key: i, max_images_per_prompt: 1}",
            "positions of models with images have several axes",
        ),
        ("eval: {sets: {a/b: {path: x}}}", "'a/b': give a name of letters, digits"),
        ("eval: {sets: {components: {path: x}}}", "not components, whose metrics would have it, too"),
        ("eval: {sets: {a: {path: 'environment:0-3'}}}", "there is no environment; set agent.environment.family"),
        ("rollout: {max_new_tokens: 20, max_thinking_tokens: 20}", "20 leaves no token for the answer: an answer may"),
        ("agent: {command: []}", "empty: give a program and its arguments"),
        ("agent: {command: [a], path: a.py}", "agent.path is a.py: an episode is played by one of the two"),
        (
            "agent: {command: [a]}\ndata: {apply_chat_template: true}",
            "a program gets the prompt as it is in the data, and the gateway renders the messages it sends",
        ),
        (
            "reward: {overlong: {buffer_length: 21}}\nrollout: {max_new_tokens: 20}",
            "21 is above the 20 tokens that an episode may sample: set it to 20 or less, or raise rollout.max_new",
        ),
        (
            "reward: {overlong: {buffer_length: 81}}\nrollout: {max_new_tokens: 20}\nagent: {path: a.py, max_steps: 4}",
            "81 is above the 80 tokens",
        ),
        ("algorithm: {filtering: {enabled: true, low: 1, high: 1}}", "1.0 is not below high, 1.0"),
        ("train: {dtype: fp16}", "fp16 needs loss scaling: set train.backend to deepspeed"),
        (
            "train: {backend: deepspeed, dtype: fp16, fp32_master: false}",
            "small updates of fp16 weights would be rounded away",
        ),
        ("reward: {clip: [1.0, 0.0]}", "the first must be below the second"),
        ("data: {prompt_max_length: 64, max_length: 64}", "leaves no token to sample within data.max_length 64"),
        ("train: {max_tokens_per_device: 9}", "9 holds no sequence of data.max_length, 2048 tokens"),
        ("task: rm\ntrain: {max_tokens_per_device: 4000}", "4000 holds no pair of data.max_length, 4096 tokens"),
        ("rollout: {max_tokens_per_device: 9}", "9 holds no sequence of data.max_length, 2048 tokens"),
        (
            "train: {max_tokens_per_device: 9, sequence_parallel_size: 2}",
            "9 over train.sequence_parallel_size 2 devices",
        ),
        ("train: {sequence_parallel_size: 2, packing: false}", "2 devices can share only packed sequences"),
        (
            "train: {sequence_parallel_size: 4, backend: deepspeed, deepspeed: {tensor_parallel_size: 2}}",
            "2 ranks share layers, and train.sequence_parallel_size 4 share sequences: set one of the two to 1",
        ),
        ("data: {path: 'a,b', probs: '0.1,0.2,0.7'}", "3 probabilities for 2 data sets"),
        ("data: {input_template: 'Q: '}", "needs exactly one {}"),
        ("reward: {function: r.py, url: 'http://127.0.0.1'}", "reward.function is set too"),
        ("reward: {url: reward.py}", "'reward.py' is a file: set reward.function to it"),
        ("reward: {url: 'host:5000'}", "'host:5000' is no address of a reward server: write it as http://127.0.0.1"),
        ("reward: {url: 'http://host:x/'}", "'http://host:x/' is no address (Port could not be cast"),
        ("reward: {url: 'http://a,http://b'}", "several addresses are a list"),
        ("reward: {url: ['http://a', 'http://a']}", "'http://a' is given twice"),
        ("reward: {url: []}", "an empty list: give the address of a reward server"),
        ("reward: {url: 'http://me:secret@host/x'}", "the address of host contains a user or a password: take it out"),
        (
            "algorithm: {estimator: gae}\nreward: {model: m, value_head_prefix: value_head}",
            "'score', but the critic begins as reward.model, whose head is called 'value_head'",
        ),
        ("rollout: {max_new_tokens: 64}\ndata: {max_length: 64}", "leaves no room for a prompt"),
        ("algorithm: {time_step: action}", "only simulators have actions; set it to token or chunk"),
        ("algorithm: {time_step: chunk, policy_loss: cispo}", "policy_loss cispo has ratios of its own"),
        (
            "algorithm: {time_step: chunk, policy_loss: gspo}",
            "time_step: chunk: algorithm.policy_loss gspo has one ratio",
        ),
        ("algorithm: {ratio_step: token, policy_loss: gspo}", "ratio_step: token: algorithm.policy_loss gspo has one"),
        ("algorithm: {time_step: chunk, ratio_step: action}", "ratio_step: action: only simulators have actions"),
        (
            "algorithm: {ratio_step: chunk}",
            "chunk is longer than algorithm.time_step token: a ratio is multiplied by one advantage, and each token has"
            " its own; set time_step to chunk, or remove it",
        ),
        (
            "env: {path: gym}\nalgorithm: {time_step: action, ratio_step: chunk}",
            "chunk is longer than algorithm.time_step action",
        ),
        ("env: {path: gym, num_envs: 6}\nrollout: {pipeline_stage_num: 4}", "do not divide env.num_envs 6 evenly"),
        ("env: {path: gym}\nagent: {path: a.py}", "an episode is played by an agent or in a simulator"),
        ("env: {path: gym}\nreward: {function: r.py}", "the simulator gives the rewards; remove it"),
        (
            "env: {path: gym}\noverlap: {staleness: 1, in_flight: recompute}",
            "overlap.in_flight: recompute: simulators do not stand still",
        ),
        (
            "env: {path: gym, enable_offload: true}\noverlap: {staleness: 1}",
            "env.enable_offload: true: with overlap.staleness above 0 simulators stay",
        ),
        ("algorithm: {clip_low: 0}", "algorithm.clip_low: given 0, must be above 0"),
        ("algorithm: {clip_low: 1.5}", "algorithm.clip_low: given 1.5, must be at most 1"),
        ("algorithm: {clip_high: 0}", "algorithm.clip_high: given 0, must be above 0"),
        ("algorithm: {kl: {coef: 0.1, target: 0}}", "algorithm.kl.target: given 0, must be above 0"),
    ],
)
def test_values_that_contradict_each_other_are_an_error(text, message):
    with pytest.raises(ConfigError) as caught:
        loads(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        "http://me:s3cret@[host/x",
        "http://me:s3cret@host:x/",
        "http://me:pa/s3cret@host/",
        "me:s3cret@host:5000",
        "ftp://me:s3cret@host/",
        "http://me:s3cret@a,http://me:s3cret@b",
        "http://me:s3cret@℀/",
        "http://host/x?token=s3cret y",
    ],
)
def test_an_address_that_is_refused_is_shown_without_its_secrets(address):
    with pytest.raises(ConfigError) as caught:
        loads(f"reward: {{url: ['{address}', '{address}']}}")
    assert "is given twice" in str(caught.value)
    assert "cret" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "algorithm: {clip_low: 1, clip_high: 0.0003}",
        "algorithm: {correction: {kind: tis, low: 0, high: 2}}",
        "algorithm: {policy_loss: gspo, correction: {kind: rollout-ratio}}",
        "algorithm: {kl: {coef: 0.1, as_loss: true, estimator: k1, allow_k1_loss: true}}",
        "algorithm: {kl: {coef: 0.1, target: 1, horizon: 7}}\nrollout: {batch_size: 4, samples_per_prompt: 8}",
        "reward: {overlong: {buffer_length: 20}}\nrollout: {max_new_tokens: 20}",
        "reward: {overlong: {buffer_length: 80}}\nrollout: {max_new_tokens: 20}\nagent: {path: a.py, max_steps: 4}",
        "task: dpo\nrollout: {}",
    ],
)
def test_values_at_the_edge_of_what_fits_are_taken(text):
    assert loads(text).model_dump(exclude_unset=True) == yaml.safe_load(text)


def test_a_prompt_longer_than_a_sequence_is_one_problem():
    with pytest.raises(ConfigError) as caught:
        loads("data: {prompt_max_length: 100, max_length: 64}")
    assert [problem.key for problem in caught.value.problems] == ["data.prompt_max_length"]


def test_a_simulator_takes_the_place_of_data_and_rewards():
    base = "actor: {model: m}\nrollout: {samples_per_prompt: 2}\n"
    assert missing(loads(base + "env: {path: gym}")) == []
    [(key, message), *_] = missing(loads(base + "cluster: {component_placement: {env: 0}}"))
    assert (key, message) == (
        "env.path",
        "not set, but env is placed: name a simulator, babyai, gym, mujoco_warp or a Python file",
    )


def test_a_run_names_what_it_cannot_start_without():
    assert [key for key, _ in missing(loads(""))] == [
        "actor.model",
        "data.path",
        "reward.function",
        "rollout.samples_per_prompt",
    ]
    complete = "actor: {model: m}\ndata: {path: d}\nreward: {function: r.py}\nrollout: {samples_per_prompt: 2}"
    assert missing(loads(complete)) == []


def test_a_group_of_one_is_refused_only_where_a_group_is_needed():
    base = "actor: {model: m}\ndata: {path: d}\nreward: {function: r.py}\n"
    assert missing(loads(base + "algorithm: {estimator: reinforce}")) == []
    [(key, message)] = missing(loads(base + "algorithm: {estimator: rloo}"))
    assert key == "rollout.samples_per_prompt"
    assert "group of one has no advantage under rloo" in message


def test_rewards_to_compare_apart_are_at_least_two_and_nothing_changes_their_sum():
    base = "actor: {model: m}\ndata: {path: d}\nrollout: {samples_per_prompt: 2}\nalgorithm: {estimator: gdpo}\n"
    two = "reward: {functions: [{function: 'r.py:a'}, {function: 'r.py:b', weight: 0.5, name: c}]}"
    assert missing(loads(base + two)) == []
    assert reward_parts(loads(base + two)) == {"a": 1.0, "c": 0.5}
    mixed = "reward: {function: r.py, graders: [{kind: exact, weight: 2.0}], judge: {rubric: r, model: m}}"
    assert reward_parts(loads(base + mixed)) == {"exact": 2.0, "judge": 1.0, "function": 1.0}
    named = loads(base + "reward: {function: r.py, parts: {right: 1.0, short: 0.1}}")
    assert missing(named) == []
    assert reward_parts(named) == {"right": 1.0, "short": 0.1}
    [(key, message)] = missing(loads(base + "reward: {function: r.py}"))
    assert (key, "there is none: give two or more" in message) == ("reward.parts", True)
    for changes in ("overlong: {buffer_length: 2}", "truncation_penalty: 0.5"):
        with pytest.raises(ConfigError, match="changes the sum of rewards, and algorithm.estimator gdpo compares each"):
            loads(base + two.replace("reward: {", f"reward: {{{changes}, "))
    with pytest.raises(ConfigError, match="components: it changes the sum of rewards"):
        loads(base + two + "\ncomponents: {mine: {path: 'a.py:Mine'}}")
    with pytest.raises(ConfigError, match="group_norm compares sums of rewards; gdpo compares each of them"):
        loads("reward: {function: r.py, parts: {a: 1.0}}")


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        ("", ("rollout", "actor")),
        ("algorithm: {kl: {coef: 0.1}}", ("rollout", "reference", "actor")),
        ("algorithm: {estimator: gae}\nreward: {model: r}", ("rollout", "reward", "critic", "actor")),
        ("cluster: {component_placement: {'actor,env': all, inference: 0}}", ("rollout", "env", "inference", "actor")),
        ("task: sft", ("actor",)),
        ("task: rm", ("actor",)),
        ("task: dpo", ("actor", "reference")),
        ("task: dpo\nalgorithm: {dpo: {loss: orpo}}", ("actor",)),
        ("task: dpo\ntrain: {lora: {rank: 4}}", ("actor",)),
        ("task: dpo\ntrain: {lora: {rank: 4}}\nreference: {model: m}", ("actor", "reference")),
    ],
)
def test_roles_follow_from_the_config(text, roles):
    assert roles_of(loads(text)) == roles


def test_an_option_that_is_unset_by_null_is_not_one_that_has_no_effect():
    loads("task: rl\ntrain: {checkpointed_layers: null}\nenv: {path: null}\nreference: {model: null}")
    with pytest.raises(ConfigError, match=r"train\.checkpointed_layers: has no effect"):
        loads("task: rl\ntrain: {checkpointed_layers: 2}")
