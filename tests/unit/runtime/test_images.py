"""Images in prompts: their tokens, where these are, and the files that are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from libra_cli.config.errors import EnvironmentBroken, LibraError, StateError
from libra_cli.core.actions import TrainSample
from libra_cli.core.types import Trajectory, TrajectoryId
from libra_cli.envs.protocol import Message
from libra_cli.runtime.episodes.renderer import Renderer
from libra_cli.runtime.store.images import IMAGES, PLACES, ImageStore, ShownImage, read_places
from libra_cli.runtime.trainer.client import pack_sample
from tests.vision import IMAGE, square_of, write_processor

RED, BLUE = square_of((255, 0, 0), 64, 64), square_of((0, 0, 255), 40, 90)
ONE, OTHER = TrajectoryId(0, 0), TrajectoryId(0, 1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_processor(directory)
    config = {"model_type": "qwen3_vl", "image_token_id": IMAGE, "text_config": {}}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def renderer(model_dir: Path) -> Renderer:
    return Renderer(model_dir, images=True)


def asked(*images: bytes, text: str = "Colour?") -> Message:
    return {"role": "user", "content": text, "images": images}


def test_an_image_has_as_many_tokens_as_transformers_gives_it(
    renderer: Renderer, model_dir: Path
) -> None:
    processor = Qwen2VLImageProcessorPil.from_pretrained(model_dir)
    for height in (1, 7, 16, 31, 48, 63, 80, 127, 129, 400):
        for width in (3, 17, 32, 47, 64, 95, 112, 190, 500):
            if max(height, width) > 200 * min(height, width):
                continue
            expected = processor.get_number_of_image_patches(height, width) // 4
            ids = renderer.prompt([asked(square_of((9, 9, 9), height, width))])
            assert ids.count(IMAGE) == expected, (height, width)


def test_places_are_those_of_the_images_in_order(renderer: Renderer) -> None:
    messages = [asked(RED, BLUE), asked(RED, text="And?")]
    ids = renderer.prompt(messages)
    places = renderer.images_in(ids, messages)
    assert [place.png for place in places] == [RED, BLUE, RED]
    assert [place.tokens for place in places] == [4, 3, 4]
    for place in places:
        assert ids[place.start - 1] == 3, "the mark of the beginning"
        assert ids[place.start : place.start + place.tokens] == [IMAGE] * place.tokens
        assert ids[place.start + place.tokens] == 4, "and of the end"


def test_what_follows_a_turn_is_what_the_template_would_write(renderer: Renderer) -> None:
    said = [41, 42, 2]
    whole: list[Message] = [
        asked(RED),
        {"role": "assistant", "content": renderer.decode(said[:-1])},
        asked(BLUE, text="Now?"),
    ]
    begun = renderer.prompt(whole[:1])
    assert begun + said + renderer.extend(whole[2:], after=said) == renderer.prompt(whole)


def test_a_tool_shows_an_image_and_cannot_write_its_mark(renderer: Renderer) -> None:
    message: Message = {"role": "tool", "content": "<|image_pad|>", "images": [BLUE]}
    ids = renderer.extend([message], after=[41, 2])
    assert ids.count(IMAGE) == 3
    assert "<tool_response>\n<|vision_start|>" in renderer.decode(ids)
    with pytest.raises(LibraError, match="2 marks of images were written for 1 images"):
        renderer.prompt([asked(RED, text="<|image_pad|>")])


def test_images_are_refused_where_the_recipe_has_none_or_the_family_is_unknown(
    model_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(LibraError, match=r"model.images is false"):
        Renderer(model_dir).prompt([asked(RED)])
    write_processor(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(LibraError, match="family qwen3, whose images libra does not know"):
        Renderer(tmp_path, images=True)


def test_a_template_that_writes_no_images_is_refused(model_dir: Path, tmp_path: Path) -> None:
    write_processor(tmp_path)
    (tmp_path / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["chat_template"] = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
        "{%- if m.content is string %}{{- m.content }}{%- else %}"
        "{%- for part in m.content %}{{- part.text }}{%- endfor %}{%- endif %}"
        "{{- '<|im_end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    path.write_text(json.dumps(settings))
    with pytest.raises(LibraError, match="the chat template writes no images"):
        Renderer(tmp_path, images=True)


def test_an_image_is_kept_once_and_found_again_by_the_next_controller(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    first, second = ShownImage(7, 4, RED), ShownImage(30, 3, BLUE)
    for trajectory, image in ((ONE, first), (ONE, second), (OTHER, first), (ONE, first)):
        store.add(trajectory, image)
    assert len(list((tmp_path / IMAGES).glob("*.png"))) == 2
    with (tmp_path / IMAGES / PLACES).open("a") as file:
        file.write("[0, 0, 0, 50,")  # a crash in the middle of a line
    again = ImageStore(tmp_path)
    assert again.of(ONE) == (first, second)
    assert again.of(OTHER) == (first,)
    assert again.of(TrajectoryId(0, 0, 1)) == ()
    assert (read_places(tmp_path)[ONE][1].width, read_places(tmp_path)[ONE][1].height) == (90, 40)


def test_an_episode_that_is_rebuilt_may_not_show_another_image(tmp_path: Path) -> None:
    ImageStore(tmp_path).add(ONE, ShownImage(7, 4, RED))
    with pytest.raises(EnvironmentBroken, match="another image than before"):
        ImageStore(tmp_path).add(ONE, ShownImage(7, 4, square_of((0, 255, 0), 64, 64)))


def test_an_image_whose_file_went_is_said(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    store.add(ONE, ShownImage(7, 4, RED))
    for file in (tmp_path / IMAGES).glob("*.png"):
        file.unlink()
    with pytest.raises(StateError, match="cannot be read"):
        store.of(ONE)


def test_what_is_shown_after_the_last_turn_is_not_trained_on() -> None:
    trajectory = Trajectory(id=ONE, reward=1.0)
    trajectory.token_ids.extend([1, IMAGE, IMAGE, IMAGE, IMAGE, 41])
    first, beyond = ShownImage(1, 4, RED), ShownImage(6, 3, BLUE)
    packed = pack_sample(TrainSample(trajectory, 1, True, ()), {ONE: (first, beyond)})
    assert packed["images"] == [list(first)]
