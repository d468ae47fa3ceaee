"""Tasks: what is computed, with no loops and no devices."""
