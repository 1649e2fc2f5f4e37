"""The `negamax` command. If a required package is missing, only `negamax doctor` works."""

from __future__ import annotations

import sys

from negamax.base import env
from negamax.base.imports import large_imports
from negamax.base.standard_streams import open_missing


def main() -> int:
    """Run the command line, and return the exit code, which is 130 after Ctrl-C."""
    open_missing()
    env.set_openmp_defaults()
    try:
        try:
            with large_imports():
                from negamax.cli.main import main as run
        except ImportError as error:
            return _broken(error)
        return run()
    except KeyboardInterrupt:
        return 130


def _broken(error: ImportError) -> int:
    if sys.argv[1:2] == ["doctor"]:
        import typer

        from negamax.cli import doctor

        app = typer.Typer(add_completion=False, help=doctor.HELP)
        app.command()(doctor.command)
        app(args=sys.argv[2:], prog_name="negamax doctor")
    hint = "install negamax again; `negamax doctor` says what is missing"
    print(f"negamax: error: {' '.join(str(error).split())} ({hint})", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
