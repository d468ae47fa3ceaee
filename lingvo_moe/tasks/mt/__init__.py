"""Machine translation: model, input, vocabulary and scoring."""
