"""Documents to translate: their paragraphs as plain text, and the same documents with paragraphs replaced."""
