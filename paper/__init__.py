"""What the paper compares with and shows: its other methods, tables and figures."""
