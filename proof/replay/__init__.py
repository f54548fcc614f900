"""`lmi replay`: recorded requests, sent again or compared as they were answered."""
