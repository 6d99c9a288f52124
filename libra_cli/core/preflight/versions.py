"""Which versions fit each other: of packages, and of CUDA and NVIDIA's driver."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

TESTED: Mapping[str, str] = {
    "vllm": ">=0.32,<0.34",
    "transformers": ">=5.17,<6",
    "accelerate": ">=1.15,<2",
}
"""Versions that libra supports, as in the extras of pyproject.toml (a test compares them)."""
LEAST_DRIVER: Mapping[int, int] = {11: 450, 12: 525, 13: 580}
"""The oldest driver of a CUDA major version (docs.nvidia.com/deploy/cuda-compatibility, minor
version compatibility, table 1). A newer driver runs everything older."""


def is_tested(package: str, version: str) -> bool:
    """Whether libra is made for this version of a package."""
    return not version or _within(version, TESTED.get(package, ""))


def unmet(
    packages: Mapping[str, str], requires: Mapping[str, tuple[str, ...]], markers: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Yield (package, its requirement, the version that is there) for each that is not met."""
    for package, stated in requires.items():
        for text in stated:
            try:
                wanted = Requirement(text)
            except InvalidRequirement:
                continue
            applies = wanted.marker is None or wanted.marker.evaluate({**markers, "extra": ""})
            there = packages.get(wanted.name, "")
            if applies and there and not _within(there, str(wanted.specifier)):
                yield package, f"{wanted.name}{wanted.specifier}", there


def _within(version: str, specifier: str) -> bool:
    try:
        return SpecifierSet(specifier).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True


def least_driver(cuda: str) -> int:
    """The major version of the oldest driver for a CUDA such as ``13.0``; 0 if nobody knows."""
    major = cuda.partition(".")[0]
    return LEAST_DRIVER.get(int(major), 0) if major.isdigit() else 0


def driver_runs(driver: str, cuda: str) -> bool:
    """Whether a driver such as ``580.65.06`` runs a program that was built for a CUDA."""
    major = driver.partition(".")[0]
    return not major.isdigit() or int(major) >= least_driver(cuda)
