"""What is trained: the GPT-2-like model. Imports torch and nothing else of this project."""
