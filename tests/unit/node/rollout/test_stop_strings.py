"""A turn ends with the token that completes one of its stop strings, wherever tokens are cut."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.live import require

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
require("vllm")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    from libra_cli.node.model.tokenizer import build_tokenizer, save_tokenizer

    built = build_tokenizer()
    built.add_tokens(["}}\n", "User:"])
    save_tokenizer(built, tmp_path, max_len=64)
    return built


def request(tokenizer: Any, name: str = "a") -> Any:
    from vllm.sampling_params import SamplingParams

    ids = tokenizer.encode("say").ids
    params = SamplingParams(detokenize=False)
    return SimpleNamespace(request_id=name, prompt_token_ids=ids, sampling_params=params)


@pytest.mark.parametrize(
    ("said", "stops", "kept_text"),
    [
        ("well.\n\nUser: and", ["\n\nUser:"], "well.\n\nUser:"),
        ("an öäü end", ["äü"], "an öäü"),
        ('{"a": {}}\nmore', ["}"], '{"a": {}}\n'),  # the token that has it has more
        ("so<|im_end|>more", ["<|im_end|>"], "so<|im_end|>"),
        ("first second", ["second", "first"], "first"),
        ("nothing of it", ["\n\nUser:"], None),
    ],
)
@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_a_turn_is_kept_up_to_its_stop(
    tokenizer: Any, tmp_path: Path, said: str, stops: list[str], kept_text: str | None, at_once: int
) -> None:
    from libra_cli.node.rollout.stop_strings import StopStrings

    watched = StopStrings(str(tmp_path))
    asked = request(tokenizer)
    watched.watch(asked, stops)
    assert asked.sampling_params.stop == []  # what the engine itself is asked for is as it was
    ids, kept = tokenizer.encode(said).ids, []
    for at in range(0, len(ids), at_once):
        some = ids[at : at + at_once]
        found = watched.tokens_kept("a", some)
        kept += some[:found]
        if found is not None:
            assert tokenizer.decode(kept, skip_special_tokens=False) == kept_text
            break
    else:
        assert kept_text is None


def test_turns_without_stops_and_those_that_have_ended_are_left_alone(
    tokenizer: Any, tmp_path: Path
) -> None:
    from libra_cli.node.rollout.stop_strings import StopStrings

    watched, ids = StopStrings(str(tmp_path)), tokenizer.encode("User:").ids
    assert watched.tokens_kept("b", ids) is None
    watched.watch(request(tokenizer), ["User:"])
    watched.forget("a")
    watched.forget("never there")
    assert watched.tokens_kept("a", ids) is None
