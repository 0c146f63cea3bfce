"""Folders to put on `PYTHONPATH`, each with a module named as another project's."""

from pathlib import Path

import click


@click.command()
def transfer_queue_path() -> None:
    """Print the folder that has a module `transfer_queue`, to put on the path of each process.

    PYTHONPATH=$(breadbox transfer-queue-path) makes programs of TransferQueue use a server of
    Breadbox. Nothing else of the installation has the name.
    """
    click.echo(Path(__file__).parent / "transfer_queue" / "path")
