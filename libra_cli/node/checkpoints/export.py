"""Makes a Hugging Face directory of a checkpoint, beside the base model's configuration.

    python -m libra_cli.node.checkpoints.export

The first line of standard input is the order, one JSON object::

    checkpoint   this host's part of it, which need not be there   urls          of the other parts
    credentials  the fields of ``Credentials``, to ask for them
    model_dir    the base model                                    dtype         of the weights
    out          the directory to make                             card          see ``model_card``
    merge        an adapter into the model; else it is written as PEFT writes it, in float32

The only line of standard output is the answer, ``{"bytes"}`` or ``{"error"}``. If standard input
ends before, so does this process: whoever asked is gone.

Weights are the trainer's fp32 parameters, cast as versions for servers are, under the base model's
names; what is not trained (a tower that sees, a head that drafts) is the base model's own, as are
configuration, tokenizer, chat template and generation config: whatever loads the base model loads
this one. The directory appears complete; memory needed is
the weights once.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libra_cli.config.errors import LibraError, TrainerError
from libra_cli.config.training import LoraSpec
from libra_cli.node.checkpoints.contents import COMPLETE, about_of
from libra_cli.node.credentials import Credentials

if TYPE_CHECKING:
    from libra_cli.node.checkpoints.reader import CheckpointFiles

SHARD_BYTES = "5GB"
"""The most of one file of weights; what transformers' own ``save_pretrained`` long has used."""
WEIGHTS = {".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth", ".safetensors"}
OF_THE_BASE_ONLY = {"README.md", "libra.json"}
LICENCE_KEYS = ("license", "license_name", "license_link", "language")
ADAPTER = """## An adapter

These are the weights of an adapter. `peft.PeftModel.from_pretrained(MODEL, "DIRECTORY")` puts it
into the base model, and `vllm serve BASE --enable-lora --lora-modules NAME=DIRECTORY` serves it."""
NICE = 10
"""Servers and the trainer on this host go first."""


def export(order: Mapping[str, Any]) -> int:
    """Make the directory; return the bytes of its files.

    Raises:
        LibraError: the checkpoint has no such model, or a part of it is out of reach.
    """
    base, out = Path(order["model_dir"]), Path(order["out"])
    state, adapter = _state_of(order, base)
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    for left in out.parent.glob(f".{out.name}.*"):
        if not Path("/proc", left.suffix[1:]).exists():  # whoever made it was killed
            shutil.rmtree(left, ignore_errors=True)
    draft.mkdir(mode=0o700, parents=True)
    try:
        if adapter is not None:
            _save_adapter(state, draft, base, adapter)
        else:
            _save(state, draft)
            _copy_from(base, draft, order["dtype"])
        library = "transformers" if adapter is None else "peft"
        card = model_card(order["card"], base, library=library)
        (draft / "README.md").write_text(card, encoding="utf-8")
        shutil.rmtree(out, ignore_errors=True)
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return sum(path.stat().st_size for path in out.iterdir())


def _state_of(order: Mapping[str, Any], base: Path) -> tuple[dict[str, Any], LoraSpec | None]:
    """The tensors to write; and what they are the adapter of, if they are one's."""
    from libra_cli.node.checkpoints.reader import CheckpointFiles
    from libra_cli.node.model.adapter import published_name
    from libra_cli.node.model.weight_names import names_of

    checkpoint = Path(order["checkpoint"])
    urls = order["urls"]
    files = CheckpointFiles(checkpoint, urls, Credentials(**order["credentials"]) if urls else None)
    about = about_of(files.read(COMPLETE), checkpoint / COMPLETE).get("adapter")
    if about is None:
        return _whole(checkpoint, files, base, order["dtype"]), None
    found = read_weights(checkpoint, files, dtype="float32", names=set())
    named = {published_name(name): tensor for name, tensor in found.items()}
    groups = names_of(base).adapter_groups(named)
    state = {name: one for group in groups for name, one in group.to_disk(named).items()}
    lora = LoraSpec.model_validate(about["lora"])
    if order.get("merge"):
        return _merged(base, state, lora, order["dtype"]), None
    return state, lora


def _whole(checkpoint: Path, files: CheckpointFiles, base: Path, dtype: str) -> dict[str, Any]:
    """The checkpoint's tensors and the base model's others, under the names of its files."""
    from libra_cli.node.model.weight_names import names_of

    names = names_of(base)
    held = {name for group in names.groups for name in group.memory}
    read = read_weights(checkpoint, files, dtype=dtype, names=held)
    state: dict[str, Any] = {}
    for group in names.groups:  # each in the place of what it is made of
        state |= group.to_disk({name: read.pop(name) for name in group.memory})
    return state | _of_base(base, names.unused, dtype)


def _of_base(base: Path, names: Collection[str], dtype: str) -> dict[str, Any]:
    """The base model's own tensors of these names."""
    import torch

    from libra_cli.node.weights.model_files import tensors_in

    wanted = getattr(torch, dtype)
    return {
        name: tensor.to(wanted) if tensor.is_floating_point() else tensor
        for name, tensor in tensors_in(base)
        if name in names
    }


def _merged(base: Path, adapter: Mapping[str, Any], lora: LoraSpec, dtype: str) -> dict[str, Any]:
    """The base model's tensors in ``dtype``, with the adapter in them."""
    import torch

    from libra_cli.node.weights.adapter import adapted, factors_of
    from libra_cli.node.weights.model_files import tensors_in

    state, targets, wanted = {}, adapted(adapter), getattr(torch, dtype)
    for name, tensor in tensors_in(base):
        if name in targets:
            factors = factors_of(name, adapter)
            tensor = factors.merged(tensor, lora.alpha / lora.rank, wanted)
        state[name] = tensor.to(wanted) if tensor.is_floating_point() else tensor
    return state


def _save_adapter(state: Mapping[str, Any], directory: Path, base: Path, lora: LoraSpec) -> None:
    """Write an adapter as PEFT does: it prefixes names with what it wraps a model in."""
    from safetensors.torch import save_file

    from libra_cli.node.model.adapter import peft_config

    prefixed = {f"base_model.model.{name}": tensor for name, tensor in state.items()}
    save_file(prefixed, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    layers = {name.rsplit(".", 3)[1] for name in state}  # PEFT's all-linear would have routers too
    told = peft_config(lora, layers, base_model_name_or_path=_hub_name(base, str(base)))
    told.inference_mode = True
    told.save_pretrained(directory)


def read_weights(
    checkpoint: Path, files: CheckpointFiles, *, dtype: str, names: set[str]
) -> dict[str, Any]:
    """Return a checkpoint's model by name, in ``dtype``; of ``names``, if any, those it has.

    Raises:
        TrainerError: it has none of them.
    """
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from libra_cli.node.checkpoints.reader import CheckpointReader, PlainValues

    reader = CheckpointReader(checkpoint, files)
    described = {
        key.removeprefix("model."): about
        for key, about in reader.read_metadata().state_dict_metadata.items()
        if key.startswith("model.") and isinstance(about, TensorStorageMetadata)
    }
    state = {
        name: torch.empty(
            about.size,
            dtype=getattr(torch, dtype)
            if about.properties.dtype.is_floating_point
            else about.properties.dtype,
        )
        for name, about in described.items()
        # A tied tensor is in a checkpoint under both names, in most models under one.
        if not names or name in names
    }
    if not state:
        raise TrainerError(f"{checkpoint} has no tensor that the base model has")
    dcp.load({"model": state}, storage_reader=reader, planner=PlainValues(), no_dist=True)
    return state


def _save(state: Mapping[str, Any], directory: Path) -> None:
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(
        dict(state), directory, max_shard_size=SHARD_BYTES, metadata={"format": "pt"}
    )


def _copy_from(base: Path, directory: Path, dtype: str) -> None:
    """Configuration, tokenizer, chat template, licence: what is no weights and not of the base."""
    for path in base.iterdir():
        other = path.suffix in WEIGHTS or path.name.endswith(".index.json")
        if path.is_file() and not other and path.name not in OF_THE_BASE_ONLY:
            shutil.copyfile(path, directory / path.name)
    config = json.loads((directory / "config.json").read_bytes())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    if not (directory / "generation_config.json").exists():
        from transformers import AutoConfig, GenerationConfig

        GenerationConfig.from_model_config(AutoConfig.from_pretrained(base)).save_pretrained(
            directory
        )


def model_card(card: Mapping[str, Any], base: Path, *, library: str = "transformers") -> str:
    """Return the text of README.md: ``card`` has ``name``, ``base``, ``tags``, ``body``;
    ``library`` is what loads the directory.

    The licence is the base model's, as its own card says.
    """
    from huggingface_hub import ModelCard, ModelCardData

    its: dict[str, Any] = {}
    if (base / "README.md").is_file():
        try:
            its = ModelCard.load(base / "README.md", ignore_metadata_errors=True).data.to_dict()
        except Exception as error:  # noqa: BLE001  anybody may have written it, in any way
            sys.stderr.write(f"the base model's card cannot be read: {error}\n")
    told = {key: its[key] for key in LICENCE_KEYS if its.get(key)}
    data = ModelCardData(
        model_name=card["name"],
        base_model=_hub_name(base, card["base"]),
        library_name=library,
        pipeline_tag="text-generation",
        tags=list(card["tags"]),
        **told,
    )
    licence = told.get("license_name") or told.get("license")
    note = (
        f"The base model's licence, {licence}, holds for these weights too."
        if licence
        else "The base model's directory names no licence: look it up before you share this."
    )
    body = card["body"]
    if library == "peft":
        body += f"\n\n{ADAPTER}"
    return f"---\n{data.to_yaml()}\n---\n\n{body}\n\n## Licence\n\n{note}\n"


def _hub_name(base: Path, name: str) -> str:
    """``owner/name`` of a model in a Hugging Face cache, else the name it has here."""
    for part in base.parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/", 1)
    return name


def main() -> int:
    """Read the order from stdin, carry it out, and answer on stdout; returns the exit status."""
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    os.nice(NICE)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    answer: dict[str, object]
    try:
        answer = {"bytes": export(order)}
    except (LibraError, OSError, ValueError, RuntimeError) as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    return 1 if "error" in answer else 0


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
