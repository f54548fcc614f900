"""Write a specification for an endpoint that somebody else made. Nothing of AWS is changed."""
