"""prime-rl's keys: those of ``rl`` in one file, or of its parts under ``orchestrator``, ``trainer``
and ``inference``, and those of ``sft``.

prime-rl counts samples: ``batch_size`` is prompts x ``group_size``. Its advantage is the reward
less the group's mean, divided by nothing, its linear schedule stays until the last ``decay_steps``,
and its bound on staleness is 8 versions unless it is given. Keys that were renamed have their old
names in ``RENAMED``.
"""

from __future__ import annotations

import re
from typing import Any

from libra_cli.config.other_names.common import (
    STEPS_UNKNOWN,
    adapter,
    every,
    hosts,
    lengths,
    model_path,
    packed_rows,
    run_name,
    stand_in,
)
from libra_cli.config.other_names.rule import (
    Given,
    KeyRule,
    LeftOut,
    Made,
    Refused,
    Setting,
    Table,
    Why,
    joint,
    left,
    same,
    shown,
    turned,
    whole,
)

RENAMED = {
    "orchestrator.rollouts_per_example": "orchestrator.group_size",
    "orchestrator.sampling": "orchestrator.train.sampling",
    "orchestrator.train.sampling.max_tokens": "orchestrator.train.sampling.max_completion_tokens",
    "orchestrator.env": "orchestrator.train.source",
    "orchestrator.train.env": "orchestrator.train.source",
    "orchestrator.async_level": "max_async_level",
    "orchestrator.max_async_level": "max_async_level",
    "trainer.max_async_level": "max_async_level",
    "async_level": "max_async_level",
    "wandb": "monitors.wandb",
    "inference.model.max_model_len": "inference.vllm.max_model_len",
    "inference.gpu_memory_utilization": "inference.vllm.gpu_memory_utilization",
    "inference.parallel": "inference.vllm",
    "trainer.model.experimental.lora": "trainer.model.lora",
}
"""Keys and sections that had other names, or stood elsewhere, in older releases of prime-rl."""
DEFAULTS = {
    "orchestrator.batch_size": 128,
    "orchestrator.group_size": 1,
    "orchestrator.algo.type": "grpo",
    "orchestrator.max_off_policy_steps": 8,
    "orchestrator.seq_len": 2048,
    "trainer.optim.lr": 1e-6,
    "trainer.optim.weight_decay": 0.01,
    "trainer.optim.betas1": 0.9,
    "trainer.optim.betas2": 0.999,
    "trainer.model.lora.rank": 16,
    "trainer.model.lora.alpha": 32,
    "deployment.num_train_gpus": 1,
    "deployment.num_infer_gpus": 1,
    "deployment.gpus_per_node": 8,
}
_ADAPTER = "trainer.model.lora"


# -- batches, steps and age ------------------------------------------------------------------------


def _groups(given: Given) -> Made:
    if "orchestrator.token_batch_size" in given:
        raise Refused("counts tokens: set training.groups_per_step, which counts prompts")
    size = int(given.number("orchestrator.group_size"))
    keys = ("orchestrator.batch_size", "batch_size")
    samples = given.number(next((key for key in keys if key in given), keys[0]))
    told = given.told("orchestrator.group_size")
    if size == 1:
        yield LeftOut(
            "orchestrator.group_size",
            Why.MISSING,
            "is 1, and libra compares the samples of a prompt: groups of 8 are played",
        )
        size, told = 8, "prime-rl's is 1"
    yield Setting("rollout.group_size", size, told)
    groups = whole(samples / size, "batch_size / group_size")
    yield Setting("training.groups_per_step", groups, f"{samples} samples / {size}")


def _max_steps(given: Given) -> int | None:
    keys = ("max_steps", "orchestrator.max_steps", "trainer.max_steps")
    return next((int(given.number(key)) for key in keys if key in given), None)


def _length_of_run(given: Given) -> Made:
    steps = _max_steps(given)
    if steps is None:
        yield Setting("run.steps", STEPS_UNKNOWN, "set it: without max_steps prime-rl has no end")
    else:
        yield Setting("run.steps", steps, f"max_steps: {steps}")


def _staleness(given: Given) -> Made:
    bound = "orchestrator.max_off_policy_steps"
    key = "max_async_level" if "max_async_level" in given and bound not in given else bound
    yield Setting("training.max_staleness", int(given.number(key)), given.told(key))


def _lengths(given: Given) -> Made:
    keys = ("orchestrator.seq_len", "seq_len")
    key = next((key for key in keys if key in given), keys[0])
    most = int(given.number(key))
    turn = "orchestrator.train.sampling.max_completion_tokens"
    generated, told = int(given.number(turn, most // 2)), given.told(turn)
    if turn not in given:
        told = "half of seq_len: none is given"
    elif generated >= most:
        generated, told = most // 2, f"half of seq_len: {told} leaves nothing for a prompt"
    yield Setting("rollout.max_turn_tokens", generated, told)
    yield from lengths(most - generated, generated, given.told(key))
    packed = int(given.number("trainer.model.seq_len", most))
    if packed > most:
        yield Setting("training.micro_batch_tokens", packed, given.told("trainer.model.seq_len"))


# -- the loss --------------------------------------------------------------------------------------


def _algorithm(given: Given) -> Made:
    kind = given.get("orchestrator.algo.type")
    if kind == "opd":
        yield from _teacher(given)
        return
    if kind != "grpo":
        raise Refused(f"is {shown(kind)}, and libra has no such algorithm: grpo is written")
    yield Setting("training.advantage", "grpo", given.told("orchestrator.algo.type"))
    yield Setting("training.scale_rewards", "none", "prime-rl divides by no standard deviation")


def _teacher(given: Given) -> Made:
    teacher = "orchestrator.algo.teacher"
    url = given.get(f"{teacher}.base_url", "http://HOST:8000/v1")
    section = {"url": url}
    if f"{teacher}.name" in given:
        section["model"] = str(given.get(f"{teacher}.name"))
    yield Setting("training.loss", "distill", given.told("orchestrator.algo.type"))
    yield Setting("teacher", section, given.told(f"{teacher}.base_url"))


def _filtered(given: Given) -> Made:
    online = "orchestrator.buffer.online_difficulty_filtering"
    gates = [
        gate.get("type")
        for source in _sources(given, "train")
        for gate in ((source.get("curriculum") or {}).get("gates") or {}).values()
    ]
    if given.get(online) or "advantage_range" in gates:
        yield Setting("rollout.dynamic_sampling", True, "groups of one reward are played again")


# -- optimizer -------------------------------------------------------------------------------------


def _optimizer(root: str, given: Given) -> Made:
    kind = given.get(f"{root}optim.type", "adamw")
    if kind != "adamw":
        reason = f"is {shown(kind)}: AdamW is written; libra's muon wants sharding: ddp"
        yield LeftOut(f"{root}optim.type", Why.MISSING, reason)
    lr, decay = f"{root}optim.lr", f"{root}optim.weight_decay"
    yield Setting("training.learning_rate", given.number(lr, 1e-6), given.told(lr))
    yield Setting("training.weight_decay", given.number(decay, 0.01), given.told(decay))
    if kind == "adamw":
        first, second = f"{root}optim.betas1", f"{root}optim.betas2"
        betas = [given.number(first, 0.9), given.number(second, 0.999)]
        yield Setting("training.betas", betas, given.told(first, second))


def _schedule(root: str, given: Given) -> Made:
    section = f"{root}scheduler"
    kind = given.get(f"{section}.type", "constant")
    if kind == "constant":
        return
    if kind not in ("linear", "cosine"):
        raise Refused(f"is {shown(kind)}, and libra has no such schedule")
    warm, fall = f"{section}.warmup_steps", f"{section}.decay_steps"
    yield Setting("training.warmup_steps", int(given.number(warm, 10)), given.told(warm))
    decay = int(given.number(fall, 10)) if kind == "linear" else 0
    if kind == "cosine":
        yield Setting("training.lr_scheduler_type", "cosine", given.told(f"{section}.type"))
    elif decay:
        told = "linear stays until its decay_steps"
        yield Setting("training.lr_scheduler_type", "warmup_stable_decay", told)
        yield Setting("training.decay_steps", decay, given.told(fall))
    least = f"{section}.min_lr"
    if given.get(least):
        share = given.number(least) / given.number(f"{root}optim.lr", 1e-6)
        yield Setting("training.min_lr_ratio", share, given.told(least))


def _lora(root: str, given: Given) -> Made:
    section = f"{root}model.lora"
    if any(key == section or key.startswith(f"{section}.") for key in given.values):
        rank, alpha, targets = (f"{section}.{key}" for key in ("rank", "alpha", "target_modules"))
        known = Given(given.trainer, given.values, {rank: 16, alpha: 32})
        yield from adapter(known, rank, alpha, targets)


# -- model, hosts and environments -----------------------------------------------------------------


def _model(given: Given) -> Made:
    keys = ("model.name", "trainer.model.name", "orchestrator.model.name", "inference.vllm.model")
    named = next((given.get(key) for key in keys if key in given), "Qwen/Qwen3-0.6B")
    yield from model_path(named)


def _nodes(given: Given) -> Made:
    serve = given.defaults.get("deployment.num_infer_gpus") != 0  # sft
    if given.get("deployment.type") == "multi_node":
        size = int(given.number("deployment.gpus_per_node", 8))
        train = int(given.number("deployment.num_train_nodes", 1))
        replicas = given.number("deployment.num_infer_replicas", 1)
        servers = int(given.number("deployment.num_infer_nodes", 1) * replicas) if serve else 0
        told = f"hosts: {train} train, {servers} generate in prime-rl; here the planner says"
        yield from hosts(train + servers, size, told, serve=serve)
        return
    train = _gpus(given, "trainer_gpu_ids", "deployment.num_train_gpus")
    servers = _gpus(given, "inference_gpu_ids", "deployment.num_infer_gpus") if serve else 0
    told = f"GPUs: {train} train, {servers} generate in prime-rl; here the planner says"
    yield from hosts(1, train + servers, told, serve=serve)


def _gpus(given: Given, listed: str, counted: str) -> int:
    ids = given.get(listed)
    return len(ids) if isinstance(ids, list) else int(given.number(counted, 1))


def _sources(given: Given, part: str) -> list[dict[str, Any]]:
    found = given.get(f"orchestrator.{part}.source") or []
    return [one for one in found if isinstance(one, dict)]


def _played_by(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The environments of the sources; none if one of them is not a taskset of verifiers."""
    tasksets = [(one.get("env") or {}).get("taskset") for one in sources]
    named = [one for one in tasksets if isinstance(one, dict) and one.get("id")]
    if len(named) < len(sources):
        return []
    return [_played(*pair) for pair in zip(sources, named, strict=True)]


def _environment(given: Given) -> Made:
    sources = _sources(given, "train")
    played = _played_by(sources)
    if not played:
        yield from stand_in("in place of yours (libra help adapters, environments)")
        yield LeftOut(
            "orchestrator.train.source",
            Why.BRING,
            "environments of verifiers up to 0.3 are not played; its tasksets since 0.4 are, by "
            "environment: {name: verifiers, args: {taskset: ID}} (libra help adapters)",
        )
        return
    yield Setting("environment", played, "install verifiers and the tasksets on the controller")
    told = "a taskset brings its loop, its tools and its rewards"
    yield Setting("agent", {"function": "libra_cli.envs.adapters.verifiers:agent"}, told)
    for source in sources:
        yield from _unplayed(source)


def _played(source: dict[str, Any], taskset: dict[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = {"taskset": taskset["id"]}
    config = {key: value for key, value in taskset.items() if key != "id"}
    if config:
        arguments["config"] = config
    played: dict[str, Any] = {"name": "verifiers", "args": arguments}
    if source.get("name"):
        played["label"] = str(source["name"])
    if source.get("ratio", 1.0) != 1.0:
        played["weight"] = float(source["ratio"])
    return played


def _unplayed(source: dict[str, Any]) -> Made:
    """What of an environment is not played: harnesses, containers, several agents."""
    env = source.get("env") or {}
    place = f"orchestrator.train.source[{source.get('name', '')}].env"
    for role, seat in env.items():
        if role == "taskset" or not isinstance(seat, dict):
            continue
        kind = (seat.get("runtime") or {}).get("type", "subprocess")
        harness = (seat.get("harness") or {}).get("id", "null")
        if kind not in ("subprocess", "null") or harness != "null":
            reason = f"harness {harness}, runtime {kind}: verifiers' own are not started here"
            yield LeftOut(f"{place}.{role}", Why.MISSING, f"{reason} (libra help agents)")


def _evaluation(given: Given) -> Made:
    one: dict[str, Any] = {"every": int(given.get("orchestrator.eval.interval", 100))}
    for theirs, ours in (("group_size", "samples"), ("num_examples", "num_tasks")):
        value = every(given.get(f"orchestrator.eval.{theirs}"))
        if value is not None:
            one[ours] = value
    if given.get("orchestrator.eval.skip_first_step"):
        one["at_start"] = False
    sources = _sources(given, "eval")
    own = _played_by(_sources(given, "train"))
    played = _played_by(sources) if own else []
    if played:
        told = given.told("orchestrator.eval.source")
        yield Setting("evaluation", [one | {"environment": each} for each in played], told)
        return
    if not own:
        yield Setting("evaluation", [one], "of the environment above, on tasks of its own")
    if own or sources:
        named = ", ".join(str(source.get("name")) for source in sources)
        yield LeftOut(
            "orchestrator.eval.source",
            Why.BRING,
            f"names {named or 'none'}: name yours in evaluation[].environment, or their tasks in "
            "evaluation[].tasks (libra help evaluation)",
        )


def _checkpoints(given: Given) -> Made:
    for key in ("ckpt.interval", "trainer.ckpt.interval"):
        if every(given.get(key)):
            yield Setting("training.checkpoint_every", given.number(key), given.told(key))
            break
    for key in ("ckpt.keep_last", "trainer.ckpt.keep_last"):
        if every(given.get(key)):
            yield Setting("training.keep_checkpoints", given.number(key), given.told(key))
            break


def _name(given: Given) -> Made:
    for key in ("run.name", "monitors.wandb.name", "monitors.wandb.project"):
        if key in given and run_name(given.get(key)):
            yield Setting("run.name", run_name(given.get(key)), given.told(key))
            break


def _dashboards(given: Given) -> Made:
    if any(key.startswith("monitors.wandb") for key in given.values):
        yield Setting("run.monitors", ["wandb"], "pip install 'libra-rl[wandb]'")


def _on(value: Any) -> Any:
    return True if value else None


def _more_than_one(value: Any) -> Any:
    return value if isinstance(value, int) and value > 1 else None


def _shared(root: str) -> tuple[KeyRule, ...]:
    """The rules of the trainer's own keys, which stand under ``trainer.``, or of sft at the top."""
    return (
        joint(
            f"{root}optim.type {root}optim.lr {root}optim.weight_decay {root}optim.betas1 "
            f"{root}optim.betas2",
            "training.optimizer training.learning_rate training.weight_decay training.betas",
            "the same of adamw; prime-rl's weight_decay is 0.01 and its betas2 0.999",
            lambda given: _optimizer(root, given),
        ),
        same(f"{root}optim.max_norm", "training.max_grad_norm"),
        joint(
            f"{root}scheduler.type {root}scheduler.warmup_steps {root}scheduler.decay_steps "
            f"{root}scheduler.min_lr",
            "training.lr_scheduler_type training.warmup_steps training.decay_steps "
            "training.min_lr_ratio",
            "linear is warmup_stable_decay; min_lr is a share of lr",
            lambda given: _schedule(root, given),
            always=False,
        ),
        joint(
            f"{root}model.lora {root}model.lora.rank {root}model.lora.alpha "
            f"{root}model.lora.target_modules",
            "training.lora",
            "the same",
            lambda given: _lora(root, given),
            always=False,
        ),
        turned(f"{root}model.cp", "training.cp_size", "the same", _more_than_one),
        turned(f"{root}model.ep", "training.ep_size", "the same; auto is left out", _more_than_one),
        *_unneeded(root),
    )


def _unneeded(root: str) -> tuple[KeyRule, ...]:
    """What libra has nothing for among the trainer's own keys."""
    return (
        left(
            f"{root}model.lora.dropout {root}model.lora.modules_to_save {root}model.quantization "
            f"{root}model.index_cache {root}model.vlm {root}model.freeze_moe_router",
            Why.MISSING,
            "adapters are plain LoRA on weights in bfloat16 or float32",
            idle=(0, 0.0, True),
        ),
        left(
            f"{root}model {root}tokenizer {root}data.micro_batch_size {root}data.num_workers "
            f"{root}matmul_precision {root}data.type",
            Why.PLANNED,
            "recomputation and sharding follow from what memory there is (libra help gpus)",
            idle=("auto", 1, True),
        ),
        left(
            f"{root}gc {root}log {root}output_dir {root}dist_timeout_seconds {root}ckpt "
            f"{root}weight_broadcast {root}rollout_transport {root}monitors {root}env_vars "
            f"{root}heartbeat {root}metrics_server {root}enable_token_export {root}trace_path "
            f"{root}memory_profiler_path {root}resume {root}bench",
            Why.NOT_NEEDED,
            "a run directory holds metrics, trajectories and checkpoints",
        ),
    )


_PLACES: tuple[KeyRule, ...] = (
    joint(
        "model.name trainer.model.name orchestrator.model.name inference.vllm.model",
        "model.path",
        "a directory on every host, not a name",
        _model,
    ),
    joint(
        "max_steps orchestrator.max_steps trainer.max_steps",
        "run.steps",
        "the same",
        _length_of_run,
    ),
    joint(
        "run.name monitors.wandb.name monitors.wandb.project",
        "run.name",
        "in the letters of a file's name",
        _name,
        always=False,
    ),
    joint("monitors.wandb", "run.monitors", "wandb", _dashboards),
    joint(
        "deployment.type deployment.gpus_per_node deployment.num_train_gpus "
        "deployment.num_infer_gpus deployment.num_train_nodes deployment.num_infer_nodes "
        "deployment.num_infer_replicas trainer_gpu_ids inference_gpu_ids",
        "nodes",
        "all GPUs; the planner says which train and which generate",
        _nodes,
    ),
    joint(
        "ckpt.interval trainer.ckpt.interval ckpt.keep_last trainer.ckpt.keep_last",
        "training.checkpoint_every training.keep_checkpoints",
        "the same",
        _checkpoints,
        always=False,
    ),
    left(
        "ckpt log output_dir clean run slurm env_vars resume weight_broadcast rollout_transport "
        "monitors tokenizer heartbeat bench dry_run",
        Why.NOT_NEEDED,
        "libra starts processes over SSH; a run directory holds what is kept",
    ),
)
_RL: tuple[KeyRule, ...] = (
    joint(
        "orchestrator.batch_size batch_size orchestrator.group_size orchestrator.token_batch_size",
        "training.groups_per_step rollout.group_size",
        "samples / group_size; groups of 1 are not played",
        _groups,
    ),
    joint(
        "orchestrator.max_off_policy_steps max_async_level",
        "training.max_staleness",
        "the same; prime-rl's default is 8",
        _staleness,
    ),
    joint(
        "seq_len orchestrator.seq_len trainer.model.seq_len "
        "orchestrator.train.sampling.max_completion_tokens",
        "model.max_len rollout.max_turn_tokens training.micro_batch_tokens",
        "a trajectory's tokens; a turn's; the trainer's packed sequence",
        _lengths,
    ),
    same("orchestrator.train.sampling.temperature", "rollout.temperature"),
    joint(
        "orchestrator.algo.type orchestrator.algo.teacher.base_url orchestrator.algo.teacher.name",
        "training.advantage training.scale_rewards training.loss teacher",
        "grpo divides by no standard deviation; opd is distill with a teacher",
        _algorithm,
    ),
    joint(
        "orchestrator.train.source",
        "environment agent",
        "tasksets of verifiers; others are to be brought",
        _environment,
    ),
    joint(
        "orchestrator.buffer.online_difficulty_filtering",
        "rollout.dynamic_sampling",
        "the same, and of a source's curriculum.gates of type advantage_range",
        _filtered,
    ),
    joint(
        "orchestrator.eval.interval orchestrator.eval.group_size orchestrator.eval.num_examples "
        "orchestrator.eval.skip_first_step orchestrator.eval.source",
        "evaluation",
        "the same of each source, a taskset of verifiers",
        _evaluation,
        always=False,
    ),
    same("inference.vllm.gpu_memory_utilization", "rollout.gpu_memory"),
    turned("trainer.enable_router_replay", "training.rollout_routes", "the same", _on),
    turned("enable_fp32_lm_head", "model.fp32_lm_head", "the same", _on),
    turned("inference.enable_fp32_lm_head", "model.fp32_lm_head", "the same", _on),
    left(
        "trainer.loss",
        Why.MISSING,
        "training.sampler_correction says how tokens of older versions are weighed (libra help "
        "losses)",
    ),
    left(
        "orchestrator.algo orchestrator.train.filter_zero_advantages orchestrator.buffer "
        "orchestrator.advantage orchestrator.train.sampling orchestrator.eval.sampling "
        "orchestrator.eval orchestrator.filters",
        Why.MISSING,
        "libra has nothing like it",
        idle=(True,),
    ),
    left(
        "orchestrator.concurrency orchestrator.oversampling_factor "
        "orchestrator.max_inflight_rollouts orchestrator.tasks_per_minute "
        "orchestrator.max_concurrent inference deployment",
        Why.PLANNED,
        "libra starts vLLM's servers and fills their seats (libra help planner, scheduler)",
    ),
    left(
        "orchestrator.renderer orchestrator.model orchestrator.tokenizer orchestrator.client "
        "orchestrator.num_train_workers orchestrator.pad_to_multiple_of orchestrator.log "
        "orchestrator.env_vars orchestrator.env_server_base_port orchestrator.weight_broadcast "
        "orchestrator.ckpt orchestrator.monitors orchestrator.use_token_client orchestrator.seed "
        "orchestrator.output_dir orchestrator.resume orchestrator.prime_monitor",
        Why.NOT_NEEDED,
        "tokens of a trajectory are kept as they were generated (libra help models)",
    ),
)


def _demonstrations(given: Given) -> Made:
    name = re.sub(r".*/", "", str(given.get("data.name", "conversations")))
    told = "to be brought: rows of messages (libra help demonstrations)"
    yield Setting("demonstrations", f"{name}.jsonl", told)
    yield Setting("training.loss", "sft", "sft")


def _rows(given: Given) -> Made:
    rows = int(given.number("data.batch_size", 128))
    told = f"blocks, not conversations: {given.told('data.batch_size')}"
    yield Setting("training.groups_per_step", rows, told)
    yield packed_rows("data.batch_size", "seq_len")
    yield from lengths(given.number("data.seq_len", 128), 0, given.told("data.seq_len"))


_SFT: tuple[KeyRule, ...] = (
    joint("data.name", "demonstrations training.loss", "a file of conversations", _demonstrations),
    joint(
        "data.batch_size data.seq_len data.pack_function",
        "training.groups_per_step model.max_len",
        "rows, each a block of several conversations by either pack_function, which are to be "
        "counted; tokens of a block",
        _rows,
    ),
    left(
        "data val eval inference renderer",
        Why.MISSING,
        "nothing is played beside demonstrations, which are rows of messages: libra eval plays "
        "what was trained",
        idle=(True, 0),
    ),
)

RL = Table("prime-rl", (*_RL, *_PLACES, *_shared("trainer.")), DEFAULTS)
SFT = Table(
    "prime-rl", (*_SFT, *_PLACES, *_shared("")), {"deployment.num_infer_gpus": 0, "optim.lr": 1e-6}
)
