"""`python -m llamabatch`, and the command `llamabatch`."""

from llamabatch.utils import interrupts


def main() -> None:
    """The entry point: takes over signals before it imports anything slow."""
    interrupts.guard()
    from llamabatch.cli import main as run

    run()


if __name__ == "__main__":
    main()
