"""What several methods share, one file per idea."""
