"""How well a loss learns at an exact staleness: real trainer, real environment, one process.

    python -m tests.learning --losses dapo tba --staleness 0 2 8 16 --seeds 3 --steps 40 --out FILE
    python -m tests.learning --table FILE [--baseline staleness=0]

A run is the product's own parts without processes around them: the recipe's environment and chat
template (``runtime.episodes``), the ledger of groups and the trainer group of a real ``Machine``,
which compose batches and compute advantages, the wire form of a batch, and ``node.trainer``. What
stands in for the servers is ``sampling``: all trajectories in one batch through the Hugging Face
model, with the log-probabilities of its own samples, so that trainer and rollout agree exactly.

**Staleness k.** Before step s, version s - 1 plays until (k + 1) batches of groups are ready, and
the step takes the oldest. So each step trains on tokens k versions behind (fewer in the first k,
as in a run that begins), and what is played before step s says how good version s - 1 is.

**What is measured.** ``rewards[v]`` is the mean reward of the fresh tasks that version v played;
``area`` is their mean over all versions, ``last`` the mean over the last five; ``final`` is the
last version's mean reward on held-out tasks. ``solved`` and ``solved_area`` are the same of the
share of tasks with the full reward, for environments that also give parts of it. ``curves`` has
every number of every step, as ``rollout_kl`` and ``effective_sample_size``. Runs are appended to
the file as lines of JSON, and those that stand in it are not done again.

**Trajectories.** What plays more for a step than another (dynamic sampling) is compared with it
after equally many trajectories: ``--trajectories N`` ends a run after the step that has them.
"""
