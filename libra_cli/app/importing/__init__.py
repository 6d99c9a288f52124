"""``libra import``: a recipe from a configuration of TRL, verl or prime-rl.

    reading, shell, script   files to settings by their keys; nothing is executed
    recognition              whose settings they are, and which table holds for them
    translation              settings to keys of a recipe, and those that are left out
    writing                  the recipe as a person would write it
    command                  what ``libra import`` does

What is called what is in ``config.other_names``.
"""
