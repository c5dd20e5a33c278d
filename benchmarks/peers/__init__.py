"""Who is measured. A peer says how it is started and what it was started with; `base.measure` does the rest."""
