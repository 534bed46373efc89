"""The page of a run: text, tables and charts in one HTML file, and the same on a terminal."""
