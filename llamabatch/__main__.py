"""`python -m llamabatch`, and the command `llamabatch`."""

from llamabatch.utils import interrupts


def main() -> None:
    """Runs the command line. Signals are taken over before the slow imports."""
    interrupts.guard()
    from llamabatch.cli import main as run

    run()


if __name__ == "__main__":
    main()
