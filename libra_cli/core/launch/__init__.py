"""From a plan to the argv, environment and files of every process, by rollout and trainer backend."""
