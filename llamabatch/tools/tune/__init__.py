"""`llamabatch tune`: measures the settings that decide a model's speed, and keeps the best in a profile."""
