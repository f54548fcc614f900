"""`lmi replay`: recorded requests, sent again and compared, or compared with recorded answers."""
