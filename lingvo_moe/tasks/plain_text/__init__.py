"""Plain text: its files, vocabularies, and windows of its tokens, for tasks that learn from text alone."""
