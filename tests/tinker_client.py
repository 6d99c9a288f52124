"""Loops of Tinker's SDK as it is published, each run in a process of its own.

TINKER_BASE_URL=... TINKER_API_KEY=... python -m tests.tinker_client NAME BASE_MODEL
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
import pytest

tinker: Any = importlib.import_module("tinker")


def datum(types: Any, tokens: list[int], **inputs: Any) -> Any:
    given = {"target_tokens": tokens[1:], **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=given)


def two_clients_train_sample_save_and_load(client: Any, base_model: str) -> None:
    types, base = tinker.types, base_model
    first = client.create_lora_training_client(base, rank=8, seed=1).result()
    other = client.create_lora_training_client(base, rank=8, seed=2, train_mlp=False).result()
    tokens = first.get_tokenizer().encode("the key is seven and the door is open")
    prompt, whole = types.ModelInput.from_ints(tokens[:3]), types.ModelInput.from_ints(tokens)
    taught = datum(types, tokens, weights=[1.0] * (len(tokens) - 1))
    losses = []
    for _ in range(6):
        asked = first.forward_backward([taught] * 2, "cross_entropy")
        stepped = first.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(asked.result().metrics["loss:sum"])
        assert stepped.result().metrics["grad_norm:mean"] > 0
    assert losses[-1] < 0.8 * losses[0]

    def scores(trained: Any) -> Any:
        answer = trained.forward([taught], "cross_entropy").result()
        return np.array(answer.loss_fn_outputs[0]["logprobs"].data)

    untouched = client.create_sampling_client(base_model=base).result()
    np.testing.assert_allclose(
        scores(other), untouched.compute_logprobs(whole).result()[1:], atol=1e-4
    )
    sampler = first.save_weights_and_get_sampling_client().result()
    np.testing.assert_allclose(
        sampler.compute_logprobs(whole).result()[1:], scores(first), atol=1e-4
    )
    greedy = types.SamplingParams(max_tokens=8, temperature=0.0)
    sampled = sampler.sample(prompt, num_samples=2, sampling_params=greedy).result().sequences
    assert sampled[0].tokens == sampled[1].tokens
    assert len(sampled[0].tokens) == len(sampled[0].logprobs) <= 8
    state = first.save_state("one").result().path
    again = client.create_training_client_from_state_with_optimizer(state).result()
    np.testing.assert_array_equal(scores(again), scores(first))


def a_loop_of_importance_sampling_raises_what_it_rewards(client: Any, base_model: str) -> None:
    """The loop of GRPO in small: samples, advantages of a group, a step by what servers scored."""
    types = tinker.types
    trained = client.create_lora_training_client(base_model, rank=8, seed=3).result()
    prompt = trained.get_tokenizer().encode("the key")
    rewarded = trained.get_tokenizer().encode("e")[0]
    wish = types.SamplingParams(max_tokens=8, temperature=1.0, stop=[], seed=7)
    means = []
    for _ in range(6):
        sampler = trained.save_weights_and_get_sampling_client().result()
        found = sampler.sample(types.ModelInput.from_ints(prompt), 32, wish).result().sequences
        rewards = np.array([one.tokens.count(rewarded) / 8 for one in found])
        means.append(rewards.mean())
        data = []
        for one, advantage in zip(found, rewards - rewards.mean(), strict=True):
            before = [0.0] * (len(prompt) - 1)
            data.append(
                datum(
                    types,
                    prompt + one.tokens,
                    logprobs=before + one.logprobs,
                    advantages=before + [float(advantage)] * len(one.tokens),
                )
            )
        asked = trained.forward_backward(data, "importance_sampling")
        trained.optim_step(types.AdamParams(learning_rate=2e-2)).result()
        asked.result()
    assert means[-1] > means[0] + 0.2, means


def a_sample_ends_with_the_token_that_completes_a_string(client: Any, base_model: str) -> None:
    """Of what was learnt by heart: a model drawn at random may end anywhere."""
    types = tinker.types
    trained = client.create_lora_training_client(base_model, rank=32, seed=1).result()
    tokenizer = trained.get_tokenizer()
    tokens = tokenizer.encode("the key is seven and the door is open but nobody walks through it")
    taught = datum(types, tokens, weights=[1.0] * (len(tokens) - 1))
    for _ in range(60):
        trained.forward_backward([taught], "cross_entropy")
        trained.optim_step(types.AdamParams(learning_rate=3e-3)).result()
    sampler = trained.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(tokens[:3])
    left = tokens[3:]

    def greedy(stop: Any) -> Any:
        wish = types.SamplingParams(max_tokens=len(left), temperature=0.0, stop=stop)
        return sampler.sample(prompt, num_samples=1, sampling_params=wish).result().sequences[0]

    whole = greedy(["not in it"])
    assert (list(whole.tokens), whole.stop_reason) == (left, "length")
    until = next(n for n in range(len(left)) if "door" in tokenizer.decode(left[:n]))
    for given in ("door", ["door"], ["not in it", "door"]):
        ended = greedy(given)
        assert (list(ended.tokens), ended.stop_reason) == (left[:until], "stop")
        assert len(ended.logprobs) == len(ended.tokens)


def adapters_that_servers_have_let_go_of_are_loaded_again(client: Any, base_model: str) -> None:
    """More samplers than servers hold adapters; the first is asked before and after the others."""
    types = tinker.types
    trained = client.create_lora_training_client(base_model, rank=8, seed=1).result()
    tokens = trained.get_tokenizer().encode("the key is seven and the door is open")
    whole = types.ModelInput.from_ints(tokens)
    scores = []
    samplers = []
    for _ in range(36):
        trained.forward_backward([datum(types, tokens)], "cross_entropy")
        trained.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        samplers.append(trained.save_weights_and_get_sampling_client().result())
        scores.append(samplers[-1].compute_logprobs(whole).result()[1:])
    assert np.abs(np.subtract(scores[0], scores[-1])).max() > 0.01
    for place in (0, 20, -1):
        again = samplers[place].compute_logprobs(whole).result()[1:]
        np.testing.assert_allclose(again, scores[place], atol=1e-4)
    client.close("success").result()


def nobody_is_answered_without_the_key_and_what_is_wrong_is_said(
    client: Any, base_model: str
) -> None:
    with pytest.raises(tinker.TinkerError, match="TINKER_API_KEY is not the key"):
        tinker.ServiceClient(api_key="tml-guessed").create_lora_training_client(base_model).result()
    with pytest.raises(tinker.TinkerError, match="is not served here"):
        client.create_lora_training_client("Qwen/Qwen3-8B").result()
    with pytest.raises(tinker.TinkerError, match="ranks of 1 to 32"):
        client.create_lora_training_client(base_model, rank=64).result()


LOOPS = {
    one.__name__: one
    for one in (
        two_clients_train_sample_save_and_load,
        a_loop_of_importance_sampling_raises_what_it_rewards,
        a_sample_ends_with_the_token_that_completes_a_string,
        adapters_that_servers_have_let_go_of_are_loaded_again,
        nobody_is_answered_without_the_key_and_what_is_wrong_is_said,
    )
}

if __name__ == "__main__":
    with tinker.ServiceClient() as opened:
        LOOPS[sys.argv[1]](opened, sys.argv[2])
