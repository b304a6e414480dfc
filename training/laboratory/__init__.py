"""The laboratory: runs compared, and studies of many runs."""
