"""Checkpoints of other systems, in and out: a file a family, which says what is called how there and here."""
