"""Text: models that answer it, sentences, placeholders, inline tags; what tasks, the engine and servers share."""
