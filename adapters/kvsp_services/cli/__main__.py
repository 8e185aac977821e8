"""``python -m kvsp_services.cli`` is ``kvsp``."""

from kvsp_services.cli import main

main()
