"""Writes demonstrations of a reasoning-gym dataset: its own answers to its first problems.

    python recipes/demonstrations/chain_sum.py > recipes/demonstrations/chain-sum.jsonl

The seed is not that of any run, so that a run does not begin with these very problems.
"""

import json
import sys

from libra_cli.envs.gyms.reasoning import ReasoningGym

SEED = 777
COUNT = 100

DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
environment = ReasoningGym({"chain_sum": DIGITS})
for index in range(COUNT):
    prompt = environment.reset(environment.task(index, SEED), seed=0)
    answer = {"role": "assistant", "content": f"<answer>{environment.truth}</answer>"}
    sys.stdout.write(json.dumps({"messages": [*prompt, answer]}) + "\n")
