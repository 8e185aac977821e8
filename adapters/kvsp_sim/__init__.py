"""A simulated world for the roles, and strategies for property tests of what uses them."""
