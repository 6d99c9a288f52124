"""What looks like a secret is masked, and what only sounds like one is left."""

from __future__ import annotations

import pytest

from libra_cli.config.secrets import MASK, is_secret_name, masker

MASKED = masker()


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("WANDB_API_KEY=abcdef0123456789", f"WANDB_API_KEY={MASK}"),
        ('{"api_key": "abcdef0123456789", "a": 1}', f'{{"api_key": "{MASK}", "a": 1}}'),
        ("password: correct-horse", f"password: {MASK}"),
        ("serve --api-key abcdef0123456789 --port 1", f"serve --api-key {MASK} --port 1"),
        ("env: API_KEY=abcdef0123456789", f"env: API_KEY={MASK}"),
        ("tokenizer: API_KEY=abcdef0123456789", f"tokenizer: API_KEY={MASK}"),
        ("--hf-token=abcdef0123456789", f"--hf-token={MASK}"),
        ("Authorization: Bearer abc.DEF-123~x", f"Authorization: Bearer {MASK}"),
        ("authorization: basic dXNlcjpwYXNz", f"authorization: basic {MASK}"),
        ("https://me:pa55word@host/x", f"https://{MASK}@host/x"),
        ("GET /v1?token=abcdef0123&n=3", f"GET /v1?token={MASK}&n=3"),
        ("login hf_abcdefghijklmnopqrst ok", f"login {MASK} ok"),
        ("sk-proj-abcdefghijklmnopqrst", MASK),
        ("ghp_abcdefghijklmnopqrstuvwx", MASK),
        ("eyJhbGciOiJIUzI1.eyJzdWIiOiIx.c2lnbmF0dXJl", MASK),
        (
            "-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl\nbnNz\n-----END OPENSSH PRIVATE KEY-----\nx",
            f"{MASK}\nx",
        ),
        ("-----BEGIN RSA PRIVATE KEY-----\ncut off", MASK),
    ],
)
def test_secrets_are_masked(text, seen):
    assert MASKED(text) == seen
    assert MASKED(seen) == seen


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens: 1234567890",
        "tokens_per_s=557.23456",
        '{"token_staleness_mean": 0.31, "token_ids": [1, 2]}',
        "eos_token='<|im_end|>' bos_token=<|begin_of_text|>",
        "secrets: {KEY: ${SEARCH_API_KEY}}",
        "tokenizer=/models/Qwen3-8B",
        "a token is expected here; the secret of keys",
        "NODE_KEY_FILE=/home/me/keys/id_ed25519",
        "http://127.0.0.1:8000/v1",
        "the key: short",
        "commit 3d6a3d67e3e14345aa00ff3d6a3d67e3e14345aa",
    ],
)
def test_what_only_sounds_like_one_is_left(text):
    assert MASKED(text) == text


def test_a_known_secret_is_masked_wherever_it_stands():
    mask = masker(["hunter2!", "abc"])
    assert mask("it said hunter2! twice: hunter2!abc") == f"it said {MASK} twice: {MASK}abc"


def test_a_known_secret_of_fewer_than_six_characters_stands_in_any_text():
    assert masker(["abcdef", "vwxyz"])("abcdef and vwxyz") == f"{MASK} and vwxyz"


@pytest.mark.parametrize("known", [["hunter2!", "hunter2!again"], ["hunter2!again", "hunter2!"]])
def test_of_two_known_secrets_that_begin_alike_the_longer_one_is_masked_whole(known):
    assert masker(known)("hunter2!again, hunter2!") == f"{MASK}, {MASK}"


def test_a_long_word_costs_no_more_than_its_length():
    assert MASKED("a" * 500_000 + " token" * 50_000).startswith("aaa")


@pytest.mark.parametrize("name", ["HF_TOKEN", "api-key", "x.password", "Key", "AWS_SECRET_ID"])
def test_names_of_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["PATH", "keyboard", "tokenizer", "SSH_KEY_FILE", "monkey"])
def test_names_of_other_things(name):
    assert not is_secret_name(name)
