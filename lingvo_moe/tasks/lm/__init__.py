"""Language modelling: a decoder over plain text, its perplexity, and continuations of prompts."""
