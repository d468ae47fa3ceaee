"""Text: vocabularies, sentences, languages, constraints, alignments and requests; what tasks and the engine share."""
