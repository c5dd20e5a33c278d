"""Measuring and planning: compare, tune, plan, doctor, synth. Imports everything but `cli`."""
