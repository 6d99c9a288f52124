"""The processes that try a host's torch, the model on it, and it with another host."""

from __future__ import annotations

from libra_cli.config.recipe import NodeSpec
from libra_cli.core.launch.process import HostFacts, ProcessSpec, common_env, interface_env
from libra_cli.core.types import Pool, Slot

ALL_REDUCE_BYTES = 16 * 2**20


def torch_probe(node: NodeSpec, facts: HostFacts, packages: tuple[str, ...]) -> ProcessSpec:
    """Return a process that imports torch and these packages with
    all GPUs of a node, and prints JSON.
    """
    module = "libra_cli.node.checks.torch_report"
    return ProcessSpec(
        node=node.name,
        process="check-torch",
        argv=(facts.python, "-m", module, *packages),
        env={**common_env(node, [_slot(node, node.gpus)], facts), **node.env},
    )


def names_probe(node: NodeSpec, facts: HostFacts, path: str) -> ProcessSpec:
    """Maps the names of the files of a model's directory to its tensors and back; prints JSON."""
    return ProcessSpec(
        node=node.name,
        process="check-names",
        argv=(facts.python, "-m", "libra_cli.node.checks.model_names", path),
        env={**common_env(node, [_slot(node, node.gpus)], facts), **node.env},
    )


def all_reduce_probe(
    node: NodeSpec, facts: HostFacts, *, backend: str, rank: int, address: str, port: int
) -> ProcessSpec:
    """Return one of two ranks that meet at an address, over the interface the trainer would use."""
    module = "libra_cli.node.checks.all_reduce"
    return ProcessSpec(
        node=node.name,
        process=f"check-all-reduce-{port}-{rank}",
        argv=(
            facts.python,
            "-m",
            module,
            backend,
            str(rank),
            "2",
            address,
            str(port),
            str(ALL_REDUCE_BYTES),
        ),
        env={
            **common_env(node, [_slot(node, min(1, node.gpus))], facts),
            **interface_env(facts.interface),
            **node.env,
        },
    )


def _slot(node: NodeSpec, gpus: int) -> Slot:
    return Slot(f"{node.name}/0", node.name, tuple(range(gpus)), Pool.HYBRID)
