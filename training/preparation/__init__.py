"""From documents to datasets."""
