"""The Hugging Face Hub: downloads and uploads."""
