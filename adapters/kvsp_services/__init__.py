"""What a process needs to run KVSP roles: configuration, policy, keys, stores, logs, metrics and the CLI
``kvsp``."""
