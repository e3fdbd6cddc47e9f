"""Says where bytes live, which dtypes can be combined, and how."""
