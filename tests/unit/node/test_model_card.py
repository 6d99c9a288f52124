"""What the host adds to the card of an exported model."""

from __future__ import annotations

from pathlib import Path

import pytest

hub = pytest.importorskip("huggingface_hub", reason="needs the [cpu] extra")

from libra_cli.node.checkpoints.export import model_card  # noqa: E402

CARD = {"name": "mine", "base": "Qwen3-1.7B", "tags": ["libra"], "body": "# mine"}


def read(base: Path) -> tuple[dict[str, object], str]:
    card = hub.ModelCard(model_card(CARD, base))
    return card.data.to_dict(), card.text


def test_the_licence_is_the_base_model_s(tmp_path: Path) -> None:
    about = "---\nlicense: other\nlicense_name: qwen\nlicense_link: LICENSE\n---\n# base\n"
    (tmp_path / "README.md").write_text(about)
    data, text = read(tmp_path)
    assert (data["license"], data["license_name"]) == ("other", "qwen")
    assert "The base model's licence, qwen, holds for these weights too." in text
    assert data["base_model"] == "Qwen3-1.7B"


@pytest.mark.parametrize("about", [None, "no front matter", "---\nlicense: [\n---\n"])
def test_a_base_model_without_a_licence_is_told(tmp_path: Path, about: str | None) -> None:
    if about is not None:
        (tmp_path / "README.md").write_text(about)
    data, text = read(tmp_path)
    assert "license" not in data
    assert "names no licence" in text


def test_a_model_of_the_hub_s_cache_is_named_as_there(tmp_path: Path) -> None:
    base = tmp_path / "models--Qwen--Qwen3-1.7B" / "snapshots" / "0123"
    base.mkdir(parents=True)
    assert read(base)[0]["base_model"] == "Qwen/Qwen3-1.7B"
