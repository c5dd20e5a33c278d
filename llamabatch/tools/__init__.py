"""Tools that measure and plan: compare, tune, plan, doctor, synth. They may import all packages except `cli`."""
