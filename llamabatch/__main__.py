"""`python -m llamabatch`, and the command `llamabatch`."""

from llamabatch.utils import interrupts


def main() -> None:
    """The entry point. Signals are taken over before anything that takes time is imported."""
    interrupts.guard()
    from llamabatch.cli import main as run

    run()


if __name__ == "__main__":
    main()
