"""Programs that measure and explain: compare, tune, plan, doctor, synth. Imports everything but `cli`."""
