"""`llamabatch tune`: measures the settings that decide a model's speed, and writes the best ones to a profile."""
