"""``libra tinker``: serves Tinker's SDK on the hosts of a recipe, until Ctrl-C."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from libra_cli.config.recipe import ModelSpec
from libra_cli.config.secrets import known_secrets, masker
from libra_cli.runtime.hosts.owned_directory import OwnedDirectory
from libra_cli.runtime.interrupts import CLEARING, Interrupts
from libra_cli.runtime.recipes.loader import load_recipe
from libra_cli.runtime.supervision.quotations import masked_errors
from libra_cli.runtime.tinker.adapters import SavedAdapters
from libra_cli.runtime.tinker.address import ServiceAddress
from libra_cli.runtime.tinker.hosts import TinkerHosts
from libra_cli.runtime.tinker.service import ServedModel, TinkerService


@dataclass(frozen=True, slots=True)
class TinkerAddress:
    """What a client needs: where the service is, its key, and what the model is called."""

    url: str
    key: str
    model: str


def serve(
    recipe_path: Path,
    directory: Path,
    *,
    port: int,
    max_rank: int,
    served_model_name: str | None,
    ready: Callable[[TinkerAddress], None],
    note: Callable[[str], None],
) -> None:
    """Serve until Ctrl-C; ``directory`` keeps what clients save, and clients may call the model
    ``served_model_name`` too.

    Raises:
        RecipeError: the recipe has a problem, or trains on more than one slot.
        LibraError: a host, the trainer or a server failed.
    """
    recipe = load_recipe(recipe_path)
    mask = masker(known_secrets(recipe))

    def noted(text: str) -> None:
        note(mask(text))

    with masked_errors(mask), OwnedDirectory("tinker") as work:
        hosts = TinkerHosts(recipe, work, max_rank=max_rank, note=noted)
        model = _model(recipe.model, str(hosts.model_dir), max_rank, served_model_name)
        service = TinkerService(model, hosts, SavedAdapters(directory), note=noted)

        def told(url: str) -> None:
            ServiceAddress(url, service.key).write(directory)
            ready(TinkerAddress(url, service.key, service.model.name))

        asyncio.run(_served(hosts, service, port, told, Interrupts(noted)))


async def _served(
    hosts: TinkerHosts,
    service: TinkerService,
    port: int,
    ready: Callable[[str], None],
    interrupts: Interrupts,
) -> None:
    interrupts.end_task()
    try:
        await hosts.open()
        ready(await service.start(port))
        raise await hosts.until_failed()
    except asyncio.CancelledError:
        return
    finally:
        interrupts.end_nothing(CLEARING)
        await service.close()
        await hosts.close()


def _model(spec: ModelSpec, here: str, max_rank: int, served_name: str | None) -> ServedModel:
    """Name the model as the user does; else by its directory where that is on this machine, for
    clients load the tokenizer from there; else by ``here``, the copy that hosts are asked for."""
    path = None if spec.path is None else Path(spec.path).expanduser()
    place = str(path) if path is not None and (path / "tokenizer.json").is_file() else here
    also = {here, place, *(() if path is None else (str(spec.path), *_names_on_hub(path)))}
    return ServedModel(served_name or place, frozenset(also), place, spec.max_len, max_rank)


def _names_on_hub(path: Path) -> tuple[str, ...]:
    """Return what a directory's own name, or its place in the cache of Hugging Face, says of what
    its model is called there; of ``models--Qwen--Qwen3-8B`` both parts, else the last alone."""
    cached = [one for one in path.parts if one.startswith("models--")]
    return tuple(one.removeprefix("models--").replace("--", "/") for one in (path.name, *cached))
