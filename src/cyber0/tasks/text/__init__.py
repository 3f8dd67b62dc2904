"""Tasks that a language model learns from prompts."""
