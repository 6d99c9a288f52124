"""Patches of images, M-RoPE positions, and rows with images, against transformers' own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="needs the [cpu] extra")

from transformers import AutoConfig  # noqa: E402

from libra_cli.config.errors import TrainerError  # noqa: E402
from libra_cli.node.batch.samples import SampleImage, TokenSample, read_sample  # noqa: E402
from libra_cli.node.model.batching import collate  # noqa: E402
from libra_cli.node.model.images import ImageReader, freeze_towers, positions_of  # noqa: E402
from libra_cli.node.model.scoring import ScoringModel  # noqa: E402
from libra_cli.node.model.weight_names import auto_class, names_of, text_config  # noqa: E402
from tests.vision import END, IMAGE, START, square_of, write_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
CPU = torch.device("cpu")
RED, BLUE = square_of((255, 0, 0), 64, 64), square_of((0, 0, 255), 40, 90)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("seeing")
    write_model(directory)
    return directory


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    description = text_config(model_dir)
    return auto_class(description).from_pretrained(model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def reader(model_dir: Path) -> ImageReader:
    return ImageReader(model_dir)


def sample(reader: ImageReader, pngs: Sequence[bytes], *, member: int = 0) -> TokenSample:
    """A prompt with images, in which the token of an image is also said as text, and 6 tokens."""
    ids, images = [1, 20 + member, 21], list[SampleImage]()
    for png in pngs:
        count = reader.tokens(reader.read(png))
        images.append(SampleImage(len(ids) + 1, count, png))
        ids += [START, *[IMAGE] * count, END, 30, 31]
    ids += [40, IMAGE, 41, 42, 43, 44]
    mask: NDArray[np.int8] = np.zeros(len(ids), np.int8)
    mask[-6:] = 1
    return TokenSample(
        group=0,
        member=member,
        token_ids=np.asarray(ids, np.int32),
        logprobs=np.zeros(len(ids), np.float32),
        loss_mask=mask,
        reward=0.0,
        fresh=True,
        images=tuple(images),
    )


def transformers_logprobs(model: Any, one: TokenSample, reader: ImageReader) -> Any:
    """What transformers gives the last six tokens, with positions of its own."""
    ids = torch.tensor(one.token_ids.astype(np.int64))[None]
    kinds = torch.zeros_like(ids, dtype=torch.int32)
    for image in one.images:
        kinds[0, image.start : image.start + image.tokens] = 1
    patches = [reader.read(image.png) for image in one.images]
    if not patches:
        with torch.no_grad():
            logits = model(input_ids=ids).logits
    else:
        embeds = model.get_input_embeddings()(ids)
        mask = kinds[..., None].bool()
        inner = model.model
        told, inner.get_placeholder_mask = inner.get_placeholder_mask, lambda *_, **__: (mask, None)
        try:
            with torch.no_grad():
                logits = model(
                    inputs_embeds=embeds,
                    position_ids=inner.get_rope_index(
                        ids, kinds, torch.stack([one.grid for one in patches])
                    )[0],
                    pixel_values=torch.cat([one.values for one in patches]),
                    image_grid_thw=torch.stack([one.grid for one in patches]),
                ).logits
        finally:
            inner.get_placeholder_mask = told
    return torch.log_softmax(logits[0, -7:-1], -1).gather(1, ids[0, -6:, None])[:, 0]


def test_positions_are_those_of_transformers(model: Any, reader: ImageReader) -> None:
    for pngs in ([], [RED], [RED, BLUE], [BLUE, RED, BLUE]):
        one = sample(reader, pngs)
        ids = torch.tensor(one.token_ids.astype(np.int64))[None]
        kinds = torch.zeros_like(ids, dtype=torch.int32)
        for image in one.images:
            kinds[0, image.start : image.start + image.tokens] = 1
        grids = [reader.read(png).grid for png in pngs]
        expected, _ = model.model.get_rope_index(ids, kinds, torch.stack(grids) if grids else None)
        found = positions_of(
            len(one.token_ids),
            [(image.start, reader.sides(reader.read(image.png))) for image in one.images],
        )
        np.testing.assert_array_equal(found, expected[:, 0].numpy())


def test_a_packed_row_of_several_gives_each_what_transformers_gives_it_alone(
    model: Any, reader: ImageReader, model_dir: Path
) -> None:
    samples = [
        sample(reader, pngs, member=number)
        for number, pngs in enumerate(([RED, BLUE], [], [BLUE], [RED]))
    ]
    expected = torch.cat([transformers_logprobs(model, one, reader) for one in samples])
    ours = auto_class(model.config).from_pretrained(model_dir, dtype=torch.float32).eval()
    scoring = ScoringModel(ours, ours, CPU)
    assert scoring.packs
    request = collate(samples, CPU, reader=reader).request
    with torch.no_grad():
        found = scoring.logprobs(request, temperature=1.0).logprobs
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    blind = collate([replace(one, images=()) for one in samples], CPU, reader=reader).request
    with torch.no_grad():
        unseen = scoring.logprobs(blind, temperature=1.0).logprobs
    assert (unseen - expected).abs().max() > 0.1, "images matter to this model"


def test_the_tower_gets_no_gradient_and_is_in_what_is_published(
    model: Any, reader: ImageReader, model_dir: Path
) -> None:
    ours = auto_class(model.config).from_pretrained(model_dir, dtype=torch.float32)
    freeze_towers(ours)
    scoring = ScoringModel(ours, ours, CPU)
    request = collate([sample(reader, [RED])], CPU, reader=reader).request
    scoring.logprobs(request, temperature=1.0).logprobs.sum().backward()
    given = {name: one.grad is not None for name, one in ours.named_parameters()}
    assert not any(has for name, has in given.items() if ".visual." in name)
    assert all(has for name, has in given.items() if ".visual." not in name)
    published = {name for group in names_of(model_dir).groups for name in group.memory}
    assert published == set(given)


def test_a_count_that_the_trainers_processor_does_not_give_is_refused(reader: ImageReader) -> None:
    one = sample(reader, [RED])
    (image,) = one.images
    wrong = replace(one, images=(replace(image, tokens=3),))
    with pytest.raises(TrainerError, match="an image is 4 tokens, and its prompt has 3"):
        collate([wrong], CPU, reader=reader)


def test_images_outside_of_the_tokens_or_over_each_other_are_refused() -> None:
    message: dict[str, Any] = {
        "group": 0,
        "member": 0,
        "token_ids": np.arange(8, dtype="<i4").tobytes(),
        "logprobs": np.zeros(8, "<f4").tobytes(),
        "loss_mask": np.asarray([0] * 6 + [1] * 2, "<i1").tobytes(),
        "reward": 0.0,
        "fresh": 1,
        "behind": [],
        "advantages": [],
    }
    fine = read_sample({**message, "images": [[1, 3, RED], [4, 2, BLUE]]}, max_len=8)
    assert [image.tokens for image in fine.images] == [3, 2]
    for images in ([[5, 4, RED]], [[1, 3, RED], [3, 2, RED]], [[-1, 2, RED]]):
        with pytest.raises(TrainerError, match="overlap, or are outside"):
            read_sample({**message, "images": images}, max_len=8)


def test_a_file_that_is_cut_is_told_as_such(reader: ImageReader) -> None:
    with pytest.raises(ValueError, match="an image cannot be read"):
        reader.read(RED[:-30])
    with pytest.raises(ValueError, match="an image cannot be read"):
        reader.read(b"\x89PNG\r\n\x1a\n")


def test_dropout_is_off_in_the_whole_models_configuration(model_dir: Path) -> None:
    config = text_config(model_dir)
    assert type(config) is type(AutoConfig.from_pretrained(model_dir))
    assert config.text_config.attention_dropout == 0.0
