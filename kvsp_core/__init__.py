"""KVSP: the KV Cache Storage Protocol as pure values and state machines.

Nothing in this package reads a clock, draws entropy, does I/O, starts a thread or logs.
"""
