"""The process that builds or locates the model on one host, before anything else is started."""

from __future__ import annotations

import json

from libra_cli.config.recipe import Recipe
from libra_cli.core.launch.placement import slots_of
from libra_cli.core.launch.process import HostFacts, ProcessSpec, common_env


def model_process(recipe: Recipe, facts: HostFacts) -> ProcessSpec:
    """Builds or locates the model on one host; the answer is ``<run_dir>/model.json``."""
    model = recipe.model
    spec: dict[str, object] = (
        {"path": model.path}
        if model.build is None
        else {
            "build": model.build.model_dump(mode="json", exclude_none=True),
            "cache": f"{facts.workdir}/models",
        }
    )
    slots = [slot for slot in slots_of(recipe) if slot.node == facts.node]
    node = recipe.node(facts.node)
    env = common_env(node, slots, facts)
    # What libra builds is so small that a second thread makes it slower, and needs no GPU.
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return ProcessSpec(
        node=node.name,
        process="model",
        argv=(
            facts.python,
            "-m",
            "libra_cli.node.model.build",
            f"{facts.run_dir}/model-spec.json",
            f"{facts.run_dir}/model.json",
        ),
        env=env | node.env,
        files={"model-spec.json": json.dumps(spec, indent=2)},
    )
