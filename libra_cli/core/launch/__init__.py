"""From a plan to the argv, environment and files of every process, as its backend makes them."""
