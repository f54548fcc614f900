"""Print plans, progress, uploads and states."""
