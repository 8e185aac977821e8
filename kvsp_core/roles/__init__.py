"""The roles of KVSP: machines composed into what answers requests, without I/O."""
