"""The state machines of KVSP, one file each."""
