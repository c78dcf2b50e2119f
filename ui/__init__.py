"""Pictures of a trace: figures, report, export and the browser page. Needs no torch."""
