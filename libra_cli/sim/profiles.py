"""The prices that ship with libra, and those a user has measured.

A profile is one JSON file: ``libra_cli/profiles/<gpu>-<model>.json``, or any path. Where each of
its numbers comes from is in its ``provenance``.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from libra_cli.config.errors import did_you_mean
from libra_cli.core.costs.mixture_server import MixtureServerCost
from libra_cli.core.costs.mixtures import refuse_mixture
from libra_cli.core.costs.profile import Profile, ProfileError

AS_PUBLISHED = "-as-published"
"""The end of the names of profiles that were fitted to published results and measured nowhere: they
are used where they are named, and proposed to nobody.
"""


def proposed_profiles() -> tuple[str, ...]:
    """Return the names of the shipped profiles that a run may be proposed, sorted."""
    return tuple(name for name in known_profiles() if not name.endswith(AS_PUBLISHED))


def known_profiles() -> tuple[str, ...]:
    """Return the names of all shipped profiles, sorted."""
    names = (entry.name for entry in files("libra_cli").joinpath("profiles").iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def load_profile(name_or_path: str) -> Profile:
    """A shipped profile by name, or the profile in a file.

    Raises:
        ProfileError: no such name or file, or what it holds is not a profile; names the key.
        MixtureRefused: its model is a mixture of experts, and its prices are of a dense one.
    """
    known = known_profiles()
    if name_or_path in known:
        text = files("libra_cli").joinpath("profiles", f"{name_or_path}.json").read_text("utf-8")
    elif Path(name_or_path).exists():
        text = _read(name_or_path)
    else:
        raise ProfileError(
            f"there is no profile {name_or_path!r}, nor such a file"
            f"{did_you_mean(name_or_path, known)}",
            hint=f"choose among {', '.join(known)}, or give a file",
        )
    try:
        return Profile.from_json(text)
    except ProfileError as error:
        hint = "write one with: libra bench --calibrate recipe.yaml"
        raise ProfileError(f"{name_or_path}: {error}", hint=hint) from error


def require_law(profile: Profile, model: str) -> None:
    """Refuse the prices of a dense model for a mixture of experts. Raises MixtureRefused."""
    if not all(isinstance(cost, MixtureServerCost) for cost in profile.servers.values()):
        require_dense(model)


def require_dense(model: str) -> None:
    """Refuse a model that is a mixture of experts, by its config.json if ``model`` is a directory
    here that has one, else by its name.

    Raises:
        MixtureRefused: with what is known of it.
    """
    try:
        config = json.loads(Path(model, "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        config = {}
    refuse_mixture(model, config if isinstance(config, dict) else {})


def require_gpu(profile: Profile, gpu: str) -> None:
    """Refuse a profile of another GPU than ``gpu`` (a device name, as the driver gives it).

    Raises:
        ProfileError: with both names.
    """
    wanted, given = _series(profile.gpu), _series(gpu)
    if wanted != given:
        known = ", ".join(proposed_profiles())
        raise ProfileError(
            f"profile {profile.name} is for {profile.gpu}, but the GPUs here are {gpu}",
            hint=f"one of: {known}; or libra bench --calibrate recipe.yaml",
        )


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: cannot be read ({error})", hint=f"ls -l {path}") from error


def _series(gpu: str) -> str:
    """Return the series of a GPU, as ``A100`` of ``NVIDIA A100-SXM4-80GB``."""
    words = gpu.replace("-", " ").split()
    rest = [word for word in words if word.upper() not in ("NVIDIA", "TESLA", "GPU")]
    return rest[0].upper() if rest else ""
