"""Models as other programs keep them: there and back."""
