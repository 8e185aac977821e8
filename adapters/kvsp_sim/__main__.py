"""``python -m kvsp_sim``: the simulator and the explorer without the rest of ``kvsp``."""

from __future__ import annotations

import click

from kvsp_sim.commands import explore_command, simulate_command


@click.group()
def main() -> None:
    """Simulate and explore clusters."""


main.add_command(simulate_command)
main.add_command(explore_command)

if __name__ == "__main__":
    raise SystemExit(main(standalone_mode=False))
