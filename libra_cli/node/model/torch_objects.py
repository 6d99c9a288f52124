"""What torch's own collectives for objects may unpickle: plans of checkpoints, and no more.

torch plans sharded checkpoints, and spreads shards of a model, with collectives that unpickle what
other ranks send. Whoever unpickles runs whatever the sender says, so here a pickle may name only
what such plans are made of; our own values never go that way (``messages``).
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.distributed import distributed_c10d

from libra_cli.config.errors import TrainerError

CHECKPOINT = "torch.distributed.checkpoint."
DESCRIPTION = frozenset(
    {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    }
)
"""The names of torch's module ``metadata`` that the description of a checkpoint is made of."""
ALLOWED = {
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "torch": {
        "Size",
        "bfloat16",
        "bool",
        "float16",
        "float32",
        "float64",
        "int32",
        "int64",
        "uint8",
    },
    "torch.serialization": {"_get_layout"},
    "torch.distributed._state_dict_utils": {"_TensorInfo"},
    f"{CHECKPOINT}filesystem": {"_StorageInfo", "_StoragePrefix"},
    f"{CHECKPOINT}storage": {"WriteResult"},
    f"{CHECKPOINT}metadata": DESCRIPTION,
    f"{CHECKPOINT}planner": {
        "BytesIOWriteData",
        "LoadItemType",
        "LoadPlan",
        "ReadItem",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    # How a rank says that it has failed.
    "traceback": {"FrameSummary", "StackSummary"},
}
ERRORS = ("builtins", "libra_cli.config.errors", "torch")
"""Modules whose exceptions may be unpickled, too."""


class PlanUnpickler(pickle.Unpickler):
    """Unpickles plans, and refuses whatever names anything else."""

    def find_class(self, module: str, name: str) -> Any:
        """What a pickle names; ``pickle`` calls this.

        Raises:
            TrainerError: it is no part of a plan.
        """
        if name in ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module in ERRORS:
            found = super().find_class(module, name)
            if isinstance(found, type) and issubclass(found, Exception):
                return found
        raise TrainerError(f"another rank sent a pickle that names {module}.{name}")


def restrict() -> None:
    """Have torch's collectives for objects unpickle no more than plans.

    Raises:
        TrainerError: this release of torch unpickles elsewhere.
    """
    if not hasattr(distributed_c10d, "_unpickler"):
        raise TrainerError(
            f"torch {torch.__version__} does not tell where it unpickles what ranks send",
            hint="libra help security; install a release of torch that libra names",
        )
    distributed_c10d._unpickler = PlanUnpickler
