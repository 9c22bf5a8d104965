"""A toy program."""

import typer

app = typer.Typer()


@app.command()
def main(name: str, times: int = 1) -> None:
    """Greet."""
    for _ in range(times):
        print(f"on your marks, {name}")
