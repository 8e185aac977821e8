"""``kvsp demo``: a cluster of processes on this machine, used by an ordinary client, hurt, and checked."""
