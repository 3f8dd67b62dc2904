"""Other libraries: a Trainer of Hugging Face's transformers, and loggers for runs."""
