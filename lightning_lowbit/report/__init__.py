"""The report of a run: text, tables and charts in one HTML file, and tables on a terminal."""
