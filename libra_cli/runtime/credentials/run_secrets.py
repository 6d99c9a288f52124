"""What only the controller of a run and the processes of that run may know.

It lies in the run directory, ``secrets.json``, where only this user can read it. A controller that
goes on with the run reads it there, so that what still runs on the hosts knows it again.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

from libra_cli.config.errors import StateError
from libra_cli.runtime.credentials.authority import Authority
from libra_cli.runtime.store.run_directory import make_run_dir, write_private

SECRETS = "secrets.json"
TOKEN_BYTES = 32
"""Random bytes of a token: 256 bits, what Python's ``secrets`` holds for enough against guessing
(https://docs.python.org/3/library/secrets.html)."""


@dataclass(frozen=True, slots=True)
class RunSecrets:
    """What authenticates the controller and the processes of one run."""

    token: str
    """What every request to a process of this run must bring."""
    authority_certificate: str
    """The certificate of the authority that signs those of this run's hosts, in PEM, as its key."""
    authority_key: str

    @classmethod
    def new(cls) -> Self:
        """Make new secrets, which are written nowhere."""
        authority = Authority.make()
        return cls(secrets.token_urlsafe(TOKEN_BYTES), authority.certificate, authority.key)

    @classmethod
    def make(cls, run_dir: Path) -> Self:
        """New secrets, kept in the run directory, which is made if it is not there.

        They appear whole or not at all, and replace those of before.
        """
        made = cls.new()
        make_run_dir(run_dir)
        write_private(run_dir / SECRETS, json.dumps(asdict(made)))
        return made

    @classmethod
    def read(cls, run_dir: Path) -> Self:
        """The secrets of a run.

        Raises:
            StateError: the run directory has none that can be read.
        """
        path = run_dir / SECRETS
        try:
            told = json.loads(path.read_bytes())
            return cls(**{field.name: _text(told[field.name]) for field in fields(cls)})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateError(
                f"{path} cannot be read: {type(error).__name__}: {error}",
                hint=f"libra stop {run_dir}; rm {path}; then resume the run",
            ) from error

    @classmethod
    def of(cls, run_dir: Path) -> Self:
        """The secrets the run has, or new ones if it has none: an older libra kept none.

        Raises:
            StateError: the run directory has some that cannot be read.
        """
        return cls.read(run_dir) if os.path.lexists(run_dir / SECRETS) else cls.make(run_dir)

    def credentials_of(self, node: str) -> Mapping[str, str]:
        """What a node shows to the others and knows them by; see ``Authority.issue``."""
        return Authority(self.authority_certificate, self.authority_key).issue(node)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError("not a text")
    return value
