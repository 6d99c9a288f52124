"""Environments of other packages, each behind libra's protocol; the package is imported when used.

bfcl           BFCL v4 multi-turn: 800 tasks of 8 simulated APIs
minigrid       MiniGrid: grid worlds that the model sees
openspiel      OpenSpiel: games, of which each player is a role
reasoning      reasoning-gym: 102 generators of problems, answered in text
tau2           tau2-bench: telecom alone, retail and airline with a model as the user
textarena      TextArena: games in words, of which each player is a role
textworld      TextWorld: games made to measure, played by commands
packages       what they share: a package that is missing, the order of tasks
"""
