"""Where a service is, and its key: a private file beside what its clients save."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from libra_cli.config.errors import StateError
from libra_cli.runtime.store.run_directory import write_private

FILE = "service.json"
STATUS = "/libra/status"
ANSWER_S = 20.0
"""How long a service that is busy may take to answer."""


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """What a client needs of a service."""

    url: str
    key: str

    def write(self, directory: Path) -> None:
        """Write the file, which only this user can read; another service's is replaced."""
        directory.mkdir(parents=True, exist_ok=True)
        write_private(directory / FILE, json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, directory: Path) -> ServiceAddress:
        """Read the file of a service that serves from a directory, or has.

        Raises:
            StateError: there is none, or it cannot be read.
        """
        try:
            return cls(**json.loads((directory / FILE).read_text(encoding="utf-8")))
        except (OSError, TypeError, ValueError) as error:
            raise StateError(f"{directory / FILE} tells of no service: {error}") from error


def has_service(directory: Path) -> bool:
    """Whether ``libra tinker`` serves from a directory, or has."""
    return (directory / FILE).is_file()


def ask_status(directory: Path) -> dict[str, Any]:
    """Ask the service of a directory what it serves (``TinkerService.status``).

    Raises:
        StateError: it has ended, or does not answer.
    """
    address = ServiceAddress.read(directory)
    try:
        return asyncio.run(_asked(address))
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise StateError(
            f"no libra tinker serves {directory} any more, or it does not answer at {address.url}",
            hint=f"libra tinker RECIPE -o {directory} serves again what is saved there",
        ) from error


async def _asked(address: ServiceAddress) -> dict[str, Any]:
    wait = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(timeout=wait, raise_for_status=True) as http:
        headers = {"X-Api-Key": address.key}
        async with http.get(address.url + STATUS, headers=headers) as answer:
            told: dict[str, Any] = await answer.json()
            return told
