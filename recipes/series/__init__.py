"""Time series: windows of a table, anomalies, and PatchTST."""
