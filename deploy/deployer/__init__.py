"""From what is wanted and what there is to what has to be done, and doing it: plan, apply, wait, undo."""
