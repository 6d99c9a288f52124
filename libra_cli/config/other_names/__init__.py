"""What TRL, verl and prime-rl call things, libra's key for the same, and how values carry over.

    rule            what a table has a row of, and what a row makes of a value
    trl, verl,      a table each, with the values that each takes where a
    prime_rl        configuration says nothing and libra would take another
    names           their names by themselves, for errors about unknown keys

``app.importing`` makes recipes by the tables, and the help page ``migration`` shows them.
"""
