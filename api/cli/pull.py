"""`paceline pull`: fetch a model before it is needed."""

import click

from ...runtime import blas


@click.command("pull")
@click.argument("model", default="starter")
def command(model: str) -> None:
    """Fetch MODEL (a Hugging Face id, or 'starter') into the cache and print where it is."""
    blas.preload()
    from ...runtime.model import find_model

    click.echo(find_model(model))
