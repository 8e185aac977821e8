"""A hostile world: a real cluster under load, faults and attackers, and figures of what became of it.

python -m tests.hostile                                   every row; prints its tables
python -m tests.hostile kills --kills 200                 one row
python -m tests.hostile --write docs/reliability.md       and keeps them in that page
"""
