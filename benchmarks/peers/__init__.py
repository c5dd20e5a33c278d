"""The programs to measure. A peer starts itself and names its options; `base.measure` does the rest."""
