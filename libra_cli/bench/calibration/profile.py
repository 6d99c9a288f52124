"""The profile that ``libra bench --calibrate`` makes of its measurements."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from libra_cli.bench.calibration.survey import CalibrationMeasurement, MeasurementBudget, measure
from libra_cli.bench.config import Progress
from libra_cli.config.recipe import Recipe
from libra_cli.core.costs.fitting import Fit
from libra_cli.core.costs.loads import ServerFit, fit_server, fit_training
from libra_cli.core.costs.memory import GIB, USABLE_SHARE
from libra_cli.core.costs.observed import NETWORK_BANDWIDTH, NODE_BANDWIDTH
from libra_cli.core.costs.profile import (
    Contention,
    MemoryModel,
    MoveCost,
    Profile,
    TrainingCost,
)
from libra_cli.core.launch.placement import slots_of
from libra_cli.core.launch.process import NUMBER_BYTES, dtype_of
from libra_cli.runtime.recipes.loader import load_recipe
from libra_cli.runtime.result_files import check_place, write_result
from libra_cli.sim.profiles import require_dense

CPU_OVERHEAD_GIB = 1.0
"""GiB of a server or a rank without a GPU, beside weights and KV cache,
for the interpreter and libraries; chosen.
"""


def calibrate(
    recipe_path: Path, profile_path: Path | None, *, progress: Progress
) -> tuple[Profile, Path]:
    """Measure a recipe's servers and trainer, write the profile, and return its path.

    Raises:
        InputError: the recipe is wrong, or the profile cannot be written there.
        LibraError: something could not be started or measured.
    """
    recipe = load_recipe(recipe_path)
    hint = f"libra bench --calibrate {recipe_path} --out profile.json"
    check_place(profile_path or Path("profile.json"), hint=hint)
    if recipe.model.path:
        require_dense(recipe.model.path)  # before anything is started; the model may be elsewhere
    measured = measure(recipe, MeasurementBudget(), note=progress)
    profile = profile_of(measured)
    path = profile_path or Path(f"{profile.name}.json")
    write_result(path, profile.to_json())
    return profile, path


def profile_of(measured: CalibrationMeasurement) -> Profile:
    """The prices that explain the measurements best.

    Raises:
        FittingError: they say too little.
    """
    facts = _facts(measured)
    fits = {
        shape.tensor_parallel: fit_server(
            shape.turns,
            tensor_parallel=shape.tensor_parallel,
            kv_tokens=shape.facts.kv_tokens,
            chunk_tokens=measured.chunk_tokens,
        )
        for shape in measured.shapes
    }
    training = fit_training(measured.batches, ranks=measured.ranks)
    step_s, token_s, pair_s = training.prices
    gpu, model = _gpu(measured), _model_name(measured.recipe)
    return Profile(
        name=_slug(f"{gpu}-{model}"),
        gpu=gpu,
        model=model,
        servers={degree: fitted.cost for degree, fitted in fits.items()},
        training=TrainingCost(
            token_s=token_s,
            pair_s=pair_s,
            step_s=step_s,
            facts=facts,
            node_bandwidth=NODE_BANDWIDTH,
            network_bandwidth=NETWORK_BANDWIDTH,
            node_gpus=max(node.gpus or node.num_slots for node in measured.recipe.slot_nodes),
            micro_tokens=measured.recipe.training.micro_batch_tokens,
        ),
        moves=_moves(measured),
        overhead_s=0.0,
        provenance=_provenance(measured, fits, training),
        surroundings=_contention(measured, fits),
    )


def _contention(measured: CalibrationMeasurement, fits: Mapping[int, ServerFit]) -> Contention:
    serving = [max(1.0, one.turn_beside_s / one.turn_alone_s) for one in measured.sharing]
    training = [max(1.0, one.step_beside_s / one.step_alone_s) for one in measured.sharing]
    return Contention(
        sync_s=median(sync.seconds for sync in measured.syncs),
        stall_s=median(sync.stall_s for sync in measured.syncs),
        turn_s=fmean(fitted.turn_s for fitted in fits.values()),
        serving_slowdown=fmean(serving) if serving else 1.0,
        training_slowdown=fmean(training) if training else 1.0,
    )


def _moves(measured: CalibrationMeasurement) -> MoveCost:
    sync_s = median(sync.seconds for sync in measured.syncs)
    starts = {shape.tensor_parallel: shape.start_s for shape in measured.shapes}
    return MoveCost(
        to_training_s=measured.stop_s + measured.trainer_start_s,
        to_rollout_s=max(starts.values()) + sync_s,
        resize_s=measured.stop_s + measured.trainer_start_s,
        start_s=starts,
    )


# -- what the hosts and the model say ------------------------------------------------------------


def _facts(measured: CalibrationMeasurement) -> MemoryModel:
    """Sizes from config.json and the published version; memory as the hosts have it."""
    config = measured.model.get("text_config") or measured.model
    assert isinstance(config, dict)
    recipe = measured.recipe
    size = NUMBER_BYTES[dtype_of(recipe.model, slots_of(recipe))]
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    layers = config["num_hidden_layers"]
    on_gpus = any(slot.gpus for slot in slots_of(recipe))
    memory = MemoryModel(
        parameters=measured.model_bytes / size,
        layers=layers,
        hidden=config["hidden_size"],
        vocabulary=config["vocab_size"],
        kv_bytes=2.0 * layers * kv_heads * head * size,
        gpu_gib=_memory_gib(measured),
        usable_share=(on_gpus and recipe.rollout.gpu_memory) or USABLE_SHARE,
        scored_heads=0 if config.get("attn_logit_softcapping") is None else heads,
    )
    if on_gpus:
        return memory
    return replace(
        memory, server_overhead_gib=CPU_OVERHEAD_GIB, trainer_overhead_gib=CPU_OVERHEAD_GIB
    )


def _memory_gib(measured: CalibrationMeasurement) -> float:
    """GiB of the smallest GPU; without GPUs a slot's share of its host's memory."""
    found: list[float] = []
    for node in measured.recipe.slot_nodes:
        host = measured.hosts[node.name]
        gpus = host["gpus"]
        assert isinstance(gpus, list)
        if node.gpus:
            found += [gpu["mem_total"] / GIB for gpu in gpus[: node.gpus]]
        else:
            found.append(float(str(host["mem_total"])) / GIB / node.num_slots)
    return min(found)


def _gpu(measured: CalibrationMeasurement) -> str:
    for node in measured.recipe.nodes:
        gpus = measured.hosts[node.name]["gpus"]
        if node.gpus and isinstance(gpus, list) and gpus:
            return str(gpus[0]["name"])
    return "CPU"


def _model_name(recipe: Recipe) -> str:
    if recipe.model.path is not None:
        return recipe.model.path.rstrip("/").rpartition("/")[2]
    assert recipe.model.build is not None
    return recipe.model.build.name


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def _provenance(
    measured: CalibrationMeasurement, fits: Mapping[int, ServerFit], training: Fit
) -> dict[str, str]:
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(measured.at))
    hosts = [
        f"{name}: {facts['cpus']} cores, {float(str(facts['mem_total'])) / GIB:.0f} GiB"
        for name, facts in measured.hosts.items()
    ]
    servers = [
        f"TP{shape.tensor_parallel}, {shape.servers} at once: "
        f"{fits[shape.tensor_parallel].fit.summary()}"
        for shape in measured.shapes
    ]
    sharing = [
        f"{one.load}: turn {one.turn_alone_s * 1e3:.1f} ms alone, {one.turn_beside_s * 1e3:.1f} "
        f"beside training; step {one.step_alone_s:.2f} s alone, {one.step_beside_s:.2f} beside"
        for one in measured.sharing
    ]
    return {
        "measured": f"libra bench --calibrate, {day}; nothing else may have run on the hosts",
        "hosts": "; ".join(hosts),
        "vllm": ", ".join(sorted({shape.facts.version for shape in measured.shapes})),
        "servers": "; ".join(servers),
        "training": f"{measured.ranks} ranks: {training.summary()}",
        "sharing": "; ".join(sharing),
        "moves": "starts of servers and trainer as measured; a move is made up of them",
        "bandwidths": "assumed, not measured",
        "overhead": "not told apart from the kernels: 0",
    }
