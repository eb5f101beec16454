"""What has no fixed shape: text, objects, ragged arrays, whole frames, and rows that are skipped."""
