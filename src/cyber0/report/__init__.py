"""What a run looks like afterwards: pictures and the report."""
