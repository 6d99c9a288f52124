"""FrozenLake of TextArena, a game of several turns: what credit by turn and the like are worth.

    pip install textarena
    python -m tests.frozen_lake ~/.libra/frozen-lake
    libra run tests/frozen_lake/sft.yaml && libra export RUN_DIR --to ~/.libra/frozen-lake/policy
    python -m tests.learning --recipe tests/frozen_lake/rl.yaml --steps 30

The first command writes demonstrations and a Qwen3 of half a million random parameters, whose
tokenizer has a token for each cell of the board. After 200 steps of imitation it wins 0.4 to 0.5 of
the games that nobody demonstrated. The package is in no extra of libra's, which needs it nowhere.
"""
