"""Configuration of a model: fields, the registry of models, gin files, and imports of a user's own models."""
