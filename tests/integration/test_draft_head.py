"""Whether what a worker holds of a head that drafts is what the head's files have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import save_file

pytest.importorskip("torch", reason="needs the [cpu] extra")

import torch

from libra_cli.node.rollout.draft_head import DraftHead, joined
from libra_cli.node.rollout.proof import prove_loaded

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def head_of(policy: Any) -> Any:
    """A head with an embedding of the policy, a layer of its own, and fewer tokens."""
    head = torch.nn.Module()
    head.model = torch.nn.Module()
    head.model.embed_tokens = policy.embed_tokens
    head.model.fc = torch.nn.Linear(4, 2, bias=False)
    head.draft_id_to_target_id = torch.nn.Parameter(torch.tensor([0, 3]), requires_grad=False)
    return head


@pytest.fixture
def parts(tmp_path) -> tuple[Any, Any, DraftHead]:
    policy = torch.nn.Module()
    policy.embed_tokens = torch.nn.Embedding(5, 2)
    head = head_of(policy)
    tensors = {
        "embed_tokens.weight": policy.embed_tokens.weight.detach().clone(),
        "fc.weight": head.model.fc.weight.detach().clone(),
        "d2t": torch.tensor([0, 3]),
        "t2d": torch.tensor([True, False, False, False, True]),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    draft = SimpleNamespace(model=tmp_path, hf_text_config=None, dtype=torch.float32)
    config = SimpleNamespace(method="eagle3", draft_model_config=draft)
    return policy, head, DraftHead(head, policy, config)


def wrong(told: dict[str, Any]) -> tuple[str, ...]:
    proof = prove_loaded([told])
    return (*proof.different, *proof.untraced)


def test_a_head_that_is_the_one_in_its_files_is_proved(parts):
    told = parts[2].told()
    assert list(told["expected"]) == ["draft model: model.fc.weight"]
    assert wrong(told) == ()


def test_the_policy_s_embedding_may_change_and_the_head_s_own_layer_may_not(parts):
    policy, head, draft = parts
    with torch.no_grad():
        policy.embed_tokens.weight.add_(1)
    assert wrong(draft.told()) == ()
    with torch.no_grad():
        head.model.fc.weight[1, 2] += 1
    assert wrong(draft.told()) == (
        "draft model: model.fc.weight is not the one that was published (model.fc)",
    )


def test_other_tokens_than_the_files_have_are_told(parts, tmp_path):
    policy, head, _ = parts
    head.draft_id_to_target_id.data[1] = 2
    draft = SimpleNamespace(model=tmp_path, hf_text_config=None, dtype=torch.float32)
    config = SimpleNamespace(method="eagle3", draft_model_config=draft)
    told = DraftHead(head, policy, config).told()
    assert wrong(told) == ("draft model: d2t is not the one in its files",)


def test_a_tensor_that_no_module_holds_is_told(parts, tmp_path):
    policy, head, _ = parts
    save_file({"norm.weight": torch.ones(2)}, tmp_path / "more.safetensors")
    draft = SimpleNamespace(model=tmp_path, hf_text_config=None, dtype=torch.float32)
    config = SimpleNamespace(method="eagle3", draft_model_config=draft)
    told = DraftHead(head, policy, config).told()
    assert wrong(told) == ("draft model: model.norm.weight was not found in the server",)


def test_a_load_answers_of_the_policy_and_of_the_head(parts):
    policy = {"expected": {"a": {}}, "held": [{"name": "a"}], "wrong": ["b"]}
    both = joined(policy, parts[2].told())
    assert list(both["expected"]) == ["a", "draft model: model.fc.weight"]
    assert [one["name"] for one in both["held"]] == list(both["expected"])
    assert both["wrong"] == ["b"]
