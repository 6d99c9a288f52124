"""What a run learns by: a file for each algorithm, with its rules and what the controller computes.

``config.algorithms`` has the names and needs of all of them, ``node.losses`` what the ranks
compute. To ship another takes at most three files: a line there, a file here where the controller
computes something or the recipe has a rule of its own, and one there where the loss is new.
"""
