"""One training run: its configuration, its loop, its directory, and reading it back."""
